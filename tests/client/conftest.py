"""Servers in this process, for the clients that ask them."""

from tests.runtime.conftest import start, start_endless

__all__ = ["start", "start_endless"]
