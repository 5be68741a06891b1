"""The host's memory: how much there is, what fits into it, and huge pages."""
