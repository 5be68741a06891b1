"""The smallest bundle that loads."""

from tests.engines.bundle.test_manifest import root

__all__ = ["root"]
