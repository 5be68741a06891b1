"""Blocks of GGUF against ggml's own reader of them."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from outrider.export.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, decode, read_values
from outrider.export.gguf.file import GgufTensor


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Rows of random bytes, but for the float16 of each block, which are numbers of a weight's size."""
    generator = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    data = generator.integers(0, 256, (rows, columns // block, size), np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}
    for at in places.get(kind, (0, 2)):
        floats = generator.normal(0, 0.01, data.shape[:2]).astype("<f2")
        data[..., at : at + 2] = floats[..., None].view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_value_has_the_bits_that_ggml_gives_it(kind: str):
    data = random_blocks(kind, 7, 768, seed=3)
    expected = gguf.quants.dequantize(data, Kind[kind])
    found = read_values(GgufTensor(kind, (7, 768), data))
    assert found.tobytes() == expected.tobytes()
    assert np.unique(decode(kind, data).integers).size == 1 << int(kind[1])


@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_floats_are_read_as_they_are(kind: str):
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, Kind[kind]).view(np.uint8).reshape(5, -1)
    expected = gguf.quants.dequantize(data, Kind[kind])
    assert read_values(GgufTensor(kind, (5, 64), data)).tobytes() == expected.tobytes()


def test_long_rows_are_read_piece_by_piece_as_at_once():
    data = random_blocks("Q4_K", 600, 1024, seed=5)
    whole = decode("Q4_K", data).values()
    assert np.array_equal(read_values(GgufTensor("Q4_K", (600, 1024), data)), whole)
