"""Where models go when a node holds each tensor once, whoever uses it."""

from tensor_dedup.placement.fleet_file import Wanted, measured, read_fleet
from tensor_dedup.placement.plan import DoesNotFitError, FleetPlan, plan
from tensor_dedup.placement.problem import Model, Node

__all__ = [
    "DoesNotFitError",
    "FleetPlan",
    "Model",
    "Node",
    "Wanted",
    "measured",
    "plan",
    "read_fleet",
]
