"""The sampler's kernels compiled for the host."""
