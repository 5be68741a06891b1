"""Blocks of GGUF against ggml's own reader of them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from outrider.engines.base import BundleError
from outrider.export.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, decode, multiplied, read_values
from outrider.export.gguf.file import GgufTensor


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Rows of random bytes, but for the float16 of each block, which are numbers of a weight's size."""
    generator = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    data = generator.integers(0, 256, (rows, columns // block, size), np.uint8)
    places = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "Q8_0": (0,),
        "Q4_0": (0,),
        "Q5_0": (0,),
    }
    for at in places.get(kind, (0, 2)):
        floats = generator.normal(0, 0.01, data.shape[:2]).astype("<f2")
        data[..., at : at + 2] = floats[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def written(path: Path, kind: str, shape: tuple[int, int], data: np.ndarray) -> GgufTensor:
    """A tensor of a file that has something else before it."""
    path.write_bytes(bytes(32) + data.tobytes())
    return GgufTensor(kind, shape, path, 32, data.shape[1])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_value_has_the_bits_that_ggml_gives_it(tmp_path: Path, kind: str):
    # More than are read at once.
    data = random_blocks(kind, 700, 768, seed=3)
    expected = gguf.quants.dequantize(data, Kind[kind])
    tensor = written(tmp_path / "file", kind, (700, 768), data)
    assert read_values(tensor).tobytes() == expected.tobytes()
    whole = decode(tensor)
    assert whole.values().tobytes() == expected.tobytes()
    assert np.unique(whole.integers).size == 1 << int(kind[1])
    scales = multiplied(whole.scale_factors)
    assert scales.shape[1] % whole.scale_factors[-1].shape[1] == 0
    signed = whole.signed().astype(np.float32) * np.repeat(scales, whole.kind.size, 1)
    if whole.minimum_factors is not None:
        zeros = multiplied(whole.minimum_factors) + np.float32(whole.kind.middle) * scales
        signed += np.repeat(zeros, whole.kind.size, 1)
    assert np.abs(signed - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_floats_are_read_as_they_are(tmp_path: Path, kind: str):
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, Kind[kind]).view(np.uint8).reshape(5, -1)
    expected = gguf.quants.dequantize(data, Kind[kind])
    tensor = written(tmp_path / "file", kind, (5, 64), data)
    assert read_values(tensor).tobytes() == expected.tobytes()


def test_a_file_that_became_shorter_is_refused(tmp_path: Path):
    tensor = written(tmp_path / "file", "Q4_K", (2, 256), random_blocks("Q4_K", 2, 256, seed=0))
    tensor.path.write_bytes(bytes(40))
    with pytest.raises(BundleError, match="changed while it was read"):
        read_values(tensor)
