"""Engines for tests and calibration: PyTorch, one that answers by a function, and one that computes nothing."""
