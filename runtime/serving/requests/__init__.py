"""Generation requests between a protocol and the worker: the table of their fields, their checks, the worker's spec."""
