"""Trains, widens and describes the demo pair."""
