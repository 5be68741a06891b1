"""Measures what steps cost on this machine, and keeps the table."""
