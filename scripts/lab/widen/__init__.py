"""Trained pairs at any size."""
