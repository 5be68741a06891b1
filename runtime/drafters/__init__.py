"""Drafters: one class each, one line each in the registry."""
