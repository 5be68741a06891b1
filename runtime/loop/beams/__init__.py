"""Beam searches, which hold several slots each."""
