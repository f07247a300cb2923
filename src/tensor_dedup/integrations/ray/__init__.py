"""Serve a fleet of models on a Ray cluster, placed so that related models share a node.

    from tensor_dedup.integrations.ray import Fleet

    fleet = Fleet(remote="s3://bucket/models", models={"base": {"replicas": 2}, "customer-17": {}})
    fleet.apply()
    fleet.add("customer-18")
    print(fleet.status())

Each node has an actor that keeps a memory manager running and pulls missing checkpoints into the
node's store. The engines on the node are Ray Serve replicas over vLLM's `AsyncLLM`, each bound to
the node that the placement plan has chosen. Each fleet has an actor called the keeper, which
compares the fleet's specification with the running engines, and places engines again when a node is
lost. The specification is in Ray's key-value store, and Ray Serve knows which engines run.

Importing this package does not import Ray, but Ray (extra `ray`) is needed to use the package.
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
