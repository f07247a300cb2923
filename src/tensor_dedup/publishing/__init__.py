"""Publish the steps of a training (`publisher`), and follow them from other machines.

A published step is an ordinary step of a run, so everything that reads steps reads it.
"""
