"""Analysis and tuning of a bundle in process; the only part that draws pictures, never imported by the server."""
