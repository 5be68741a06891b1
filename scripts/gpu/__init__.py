"""The check to run where there is a GPU."""
