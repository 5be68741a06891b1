"""Storage of weights: 16-bit, in integer blocks, or with 8-bit activations."""
