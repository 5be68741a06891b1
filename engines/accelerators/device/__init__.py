"""Engines over a device's memory: plans, caches, uploads and whole rounds."""
