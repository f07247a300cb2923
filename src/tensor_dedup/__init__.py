"""One copy of every tensor that several models have in common."""
