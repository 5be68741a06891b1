"""Who watches the worker, and what health says of it."""
