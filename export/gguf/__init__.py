"""Models in single GGUF files: read without trust, and turned into checkpoints in Hugging Face form."""
