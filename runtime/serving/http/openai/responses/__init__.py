"""``/v1/responses``: requests as those of chats, and answers as items."""
