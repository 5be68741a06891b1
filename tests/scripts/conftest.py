"""Servers in this process, for the scripts that send them requests."""

from tests.runtime.conftest import start, start_endless

__all__ = ["start", "start_endless"]
