"""Serve a fleet of models on a Ray cluster, placed by what they have in common.

    from tensor_dedup.integrations.ray import Fleet

    fleet = Fleet(remote="s3://bucket/models", models={"base": {"replicas": 2}, "customer-17": {}})
    fleet.apply()
    fleet.add("customer-18")
    print(fleet.status())

Each node has an actor that keeps a memory manager running and pulls what is missing into the node's
store. Beside it run the engines: replicas of Ray Serve over vLLM's `AsyncLLM`, each bound to the
node that the plan chose. An actor called the keeper places again what was on a node that is lost.
What is wanted lies in Ray's own key-value store, where what runs is known from Serve.

Importing this does not import Ray; everything here needs it (extra `ray`).
"""

from tensor_dedup.integrations.ray.cluster import ClusterNode, observed
from tensor_dedup.integrations.ray.fleet import Fleet, application
from tensor_dedup.integrations.ray.keeper import FleetStatus, NodeStatus, ReplicaStatus

__all__ = [
    "ClusterNode",
    "Fleet",
    "FleetStatus",
    "NodeStatus",
    "ReplicaStatus",
    "application",
    "observed",
]
