"""What several scripts use: rigs, prompts, results, tables."""
