"""Heads of EAGLE-3: checkpoints that draft from a target's features, made graphs."""
