"""Pages of an analysis and of a search."""
