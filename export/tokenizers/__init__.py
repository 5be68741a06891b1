"""Texts of encoder-decoder checkpoints: tokenizers in one form, and what stands around sources and answers."""
