"""The container of GGUF files: what a writer of the format wrote is read, and what breaks its rules is refused."""

import re
import resource
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from outrider.engines.base import BundleError
from outrider.export.gguf.file import read_gguf

from tests.export.gguf.test_blocks import random_blocks

Q4_K = gguf.GGMLQuantizationType.Q4_K
MOST_S, MOST_MIB = 1.0, 200


def write_sample(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float64("a.double", 0.1)
    writer.add_bool("a.truth", True)
    writer.add_array("some.strings", ["", "één", "two"])
    writer.add_array("some.numbers", [1, -2, 3])
    writer.add_tensor("small", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("blocks", random_blocks("Q4_K", 3, 512, seed=1), raw_dtype=Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_pairs_and_tensors_are_those_that_were_written(tmp_path: Path):
    file = read_gguf([write_sample(tmp_path / "a.gguf")])
    assert file.pairs["general.architecture"] == "llama"
    assert (file.pairs["a.number"], file.pairs["a.double"], file.pairs["a.truth"]) == (7, 0.1, True)
    assert file.pairs["some.strings"] == ["", "één", "two"]
    assert file.pairs["some.numbers"].tolist() == [1, -2, 3]
    small, blocks = file.tensors["small"], file.tensors["blocks"]
    assert (small.kind, small.shape) == ("F32", (2, 3))
    assert small.rows(0, 2).view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (blocks.kind, blocks.shape) == ("Q4_K", (3, 512))
    assert np.array_equal(blocks.rows(0, 3), random_blocks("Q4_K", 3, 512, seed=1))


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def tensor(name: bytes, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    form = f"<I{len(sizes)}QIQ"
    return struct.pack("<Q", len(name)) + name + struct.pack(form, len(sizes), *sizes, kind, offset)


def container(pairs=(), tensors=(), data: bytes = bytes(64), version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join((*pairs, *tensors))
    return head + bytes(-len(head) % 32) + data


ONE = struct.pack("<I", 1)
WRONG = {
    "no magic": (b"GGML" + bytes(60), "magic"),
    "empty": (b"", "cannot be read"),
    "cut": (b"GGUF\3\0\0\0\1", "ends within it"),
    "an old version": (container(version=1), "must be 2 or 3"),
    "big-endian": (container(version=3 << 24), "is big-endian"),
    "too many pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "number of pairs"),
    "too many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 19, 0), "more than the file holds"),
    "a key twice": (container([pair(b"k", 4, ONE)] * 2), "given twice"),
    "an unknown type": (container([pair(b"k", 77, ONE)]), "unknown"),
    "a string beyond the end": (container([pair(b"k", 8, struct.pack("<Q", 1 << 62))]), "too long"),
    "no UTF-8": (container([pair(b"k", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "UTF-8"),
    "an array beyond the end": (
        container([pair(b"k", 9, struct.pack("<IQ", 6, 1 << 40))]),
        "is above|holds",
    ),
    "an array of arrays": (container([pair(b"k", 9, struct.pack("<IQ", 9, 1))]), "not read"),
    "no alignment": (container([pair(b"general.alignment", 4, bytes(4))]), "multiple of 8"),
    "a tensor twice": (container(tensors=[tensor(b"t", (8,), 0, 0)] * 2), "given twice"),
    "a tensor beyond the end": (container(tensors=[tensor(b"t", (64,), 0, 0)]), "passes the end"),
    "a size that overflows": (
        container(tensors=[tensor(b"t", (1 << 62, 1 << 62, 4), 0, 0)]),
        "passes the end",
    ),
    "an empty axis": (container(tensors=[tensor(b"t", (8, 0), 0, 0)]), "multiple"),
    "five axes": (container(tensors=[tensor(b"t", (1,) * 5, 0, 0)]), "axes"),
    "an unknown block": (container(tensors=[tensor(b"t", (8,), 99, 0)]), "unknown"),
    "half a block": (container(tensors=[tensor(b"t", (16,), 2, 0)]), "multiple of 32"),
    "unaligned": (container(tensors=[tensor(b"t", (8,), 0, 4)]), "unaligned"),
    "an overlap": (
        container(tensors=[tensor(b"t", (16,), 0, 0), tensor(b"u", (8,), 0, 32)]),
        "overlaps",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_breaks_a_rule_is_refused_in_one_line(tmp_path: Path, name: str):
    data, words = WRONG[name]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(data)
    with pytest.raises(BundleError, match=words) as refused:
        read_gguf([path])
    assert re.fullmatch(r"wrong\.gguf: [^\n]{1,200}", str(refused.value))


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path):
    paths = [write_sample(tmp_path / name) for name in ("a.gguf", "b.gguf")]
    with pytest.raises(BundleError, match="earlier part"):
        read_gguf(paths)


def mutated(data: bytes, generator: np.random.Generator) -> bytes:
    """A file with some bytes changed, a number made great, a piece repeated, or its end cut off."""
    found = bytearray(data)
    for _ in range(generator.integers(1, 4)):
        at = int(generator.integers(len(found)))
        match generator.integers(5):
            case 0:
                found[at] = generator.integers(256)
            case 1:
                found[at : at + 8] = generator.integers(0, 256, 8, np.uint8).tobytes()
            case 2:
                found[at : at + 8] = struct.pack("<Q", 1 << int(generator.integers(64)))
            case 3:
                found[at:at] = found[at // 2 : at]
            case _:
                del found[max(at, 1) :]
    return bytes(found)


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=pytest.mark.long)], ids=["some", "many"]
)
def test_a_mutated_file_opens_or_is_refused_in_one_line(tmp_path: Path, count: int):
    whole = write_sample(tmp_path / "whole.gguf").read_bytes()
    # All that steers the reader is in the head.
    head, path, refused = whole[:1024], tmp_path / "mutated.gguf", 0
    generator, before = np.random.default_rng(11), memory_mib()
    for _ in range(count):
        path.write_bytes(mutated(head, generator) + whole[1024:])
        begin = time.perf_counter()
        try:
            read_gguf([path])
        except BundleError as error:
            refused += 1
            assert re.fullmatch(r"mutated\.gguf: [^\n]{1,300}", str(error))
        assert time.perf_counter() - begin < MOST_S
    assert count / 4 < refused < count
    assert memory_mib() - before < MOST_MIB


def memory_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
