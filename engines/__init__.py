"""Engines run what was exported; ``open_engine`` is the one table that imports their libraries."""
