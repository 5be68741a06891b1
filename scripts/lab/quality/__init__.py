"""What weights of fewer bits lose: perplexity and agreement on a text, and programs that pass their tests."""
