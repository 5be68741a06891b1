"""Conversations to prompts: the chat templates of a bundle, rendered without transformers."""
