"""Proves exactness on a user's own bundle."""
