"""Drafts found in texts: the request's own, earlier ones, a reference or a corpus."""
