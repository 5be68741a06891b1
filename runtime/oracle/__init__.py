"""The slow float64 definition of every sampling rule and its distribution."""
