"""Adapters that take models apart, by the names of tensorcas. None imports its framework."""
