"""Transformers: the seams where a tensor becomes a parameter."""
