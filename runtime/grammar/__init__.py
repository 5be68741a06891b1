"""Constraints of answers: grammars as masks over the vocabulary, and the tokens that they force."""
