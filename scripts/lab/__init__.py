"""Benchmarks, other engines, long runs, sweeps and wider models: no part of what is installed."""
