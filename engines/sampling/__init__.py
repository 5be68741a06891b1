"""Exact speculative sampling on the host."""
