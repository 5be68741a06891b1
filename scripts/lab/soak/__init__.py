"""Thousands of requests against a server of its own process."""
