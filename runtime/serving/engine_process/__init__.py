"""Engines in a process of their own."""
