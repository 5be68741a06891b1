"""The first half hour on a GPU: three commands that find what only it can show, and choose its defaults."""
