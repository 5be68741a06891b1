"""Conversations: from messages, by the templates of a bundle, to token ids."""
