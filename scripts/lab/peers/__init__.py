"""Other engines, each in an environment of its own."""
