"""Where models go when a node holds each tensor once, whoever uses it."""

from tensor_dedup.placement.fleet_file import Wanted, measured, read_fleet
from tensor_dedup.placement.plan import DoesNotFitError, Plan, plan
from tensor_dedup.placement.problem import Model, Node

__all__ = ["DoesNotFitError", "Model", "Node", "Plan", "Wanted", "measured", "plan", "read_fleet"]
