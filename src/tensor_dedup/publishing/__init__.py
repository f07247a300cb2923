"""Publish the steps of a training, and follow them from other machines."""
