"""Chooses how many tokens to draft: acceptance, costs, and one controller."""
