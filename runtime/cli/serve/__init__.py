"""``outrider serve``: a file for each heading of its options, and the command."""
