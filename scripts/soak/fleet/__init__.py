"""Replicas as processes and on a Ray cluster, and an account of what became of requests to them."""
