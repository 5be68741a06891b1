"""Drafts made of what a target answers itself."""
