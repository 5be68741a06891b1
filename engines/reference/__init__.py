"""Engines for tests: PyTorch, and one that answers by a function."""
