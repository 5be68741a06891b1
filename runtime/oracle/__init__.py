"""The slow float64 definition of every sampling law."""
