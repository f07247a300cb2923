"""Plans which model goes to which machine, so that models with equal tensors share memory."""

from tensor_dedup.planning.placement.fleet_file import Wanted, read_fleet, wanted
from tensor_dedup.planning.placement.plan import DoesNotFitError, FleetPlan, plan
from tensor_dedup.planning.placement.problem import Model, Node

__all__ = [
    "DoesNotFitError",
    "FleetPlan",
    "Model",
    "Node",
    "Wanted",
    "plan",
    "read_fleet",
    "wanted",
]
