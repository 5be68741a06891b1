"""Weights that a checkpoint has packed as integers: read exactly, and stored as they are."""
