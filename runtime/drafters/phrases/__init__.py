"""Drafts of phrases that verification has turned up."""
