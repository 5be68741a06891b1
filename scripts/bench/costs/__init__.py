"""What one kind of work costs beside another: one file a question."""
