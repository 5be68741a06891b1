"""The offline stage: a Hugging Face checkpoint pair becomes a bundle."""
