"""Texts whose caches are kept, and how requests that begin alike are spared them."""
