"""What makes an unmodified Transformers model traceable to the canonical graphs."""
