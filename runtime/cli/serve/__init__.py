"""``outrider serve``: its settings on the command line, in the environment and in a file, and the command."""
