"""The sampler as graphs on the engines' device."""
