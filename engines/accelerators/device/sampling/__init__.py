"""The sampler on the engines' device."""
