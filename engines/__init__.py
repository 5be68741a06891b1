"""Engines run what was exported: spans of tokens in, logits out."""
