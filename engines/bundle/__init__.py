"""The exported folder: its manifest, its files and their checks."""
