"""Memory that runs out."""

from outrider.engines.base import FloatArray
from outrider.engines.kv_cache import zeros


class ScarceMemory:
    """An allocator that has room for so many more caches."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, shape: tuple[int, ...]) -> FloatArray:
        if self.room == 0:
            raise MemoryError
        self.room -= 1
        return zeros(shape)
