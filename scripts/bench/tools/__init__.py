"""Tools that benchmarks share."""
