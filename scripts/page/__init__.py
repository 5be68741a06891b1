"""Chromium at the page that shows speculation: what it sees, and a picture of it."""
