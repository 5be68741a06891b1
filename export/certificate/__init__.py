"""Parity of exported graphs with PyTorch, and the certificate that records it."""
