"""Pages that show what an analysis or a search found."""
