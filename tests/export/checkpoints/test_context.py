"""The context of a bundle whose maker names none, and what an export wants: fixed numbers."""

import pytest
from outrider.engines.memory.sizes import machine_memory_bytes, token_bytes
from outrider.export.context import (
    MOST_CONTEXT,
    default_context,
    export_memory_bytes,
)
from outrider.export.model_config import UNLIMITED_POSITIONS, ModelConfig

GIB = 1 << 30


def model_config(
    max_position: int = 131_072, window: int | None = None, num_layers: int = 32
) -> ModelConfig:
    """Sizes of Llama 3 8B unless told: 256 KiB of float32 keys and values a token."""
    return ModelConfig(
        num_layers=num_layers,
        num_kv_heads=8,
        head_size=128,
        vocab_size=128_256,
        max_position=max_position,
        window=window,
        eos_token_ids=(),
        bos_token_id=None,
    )


def test_a_token_takes_its_keys_and_values_in_float32():
    assert token_bytes(model_config().heads) == 256 << 10


@pytest.mark.parametrize(
    ("models", "expected", "words"),
    [
        (
            {"target": model_config(2048)},
            2048,
            "context 2048, all of the target's 2048: a full slot takes 512 MiB",
        ),
        ({"target": model_config(), "draft": model_config(1500)}, 1500, "all of the draft's 1500"),
        # A window is part of the mask: texts go beyond it.
        ({"target": model_config(8192, window=4096)}, 8192, "all of the target's 8192"),
        (
            {"target": model_config()},
            MOST_CONTEXT,
            "context 65536 of the target's 131072: a full slot takes 16.0 GiB",
        ),
        ({"target": model_config(UNLIMITED_POSITIONS)}, 1024, "the target names no limit"),
    ],
)
def test_the_context_is_the_models_own_and_that_is_said(
    models: dict[str, ModelConfig], expected: int, words: str
):
    found, why = default_context(models)
    assert found == expected
    assert words in why


@pytest.mark.parametrize(
    ("models", "measured"),
    [
        ([(134_515_008, 49_152)], 2.44),
        ([(268_098_176, 262_144)], 4.73),
        ([(1_777_088_000, 151_936), (630_167_424, 151_936)], 16.19),
        # GGUF files: half their bytes (``Checkpoint.num_parameters``).
        ([(98_362_432 // 2, 49_152)], 1.8),
        ([(1_117_320_768 // 2, 151_936)], 6.4),
    ],
)
def test_what_an_export_wants_is_about_what_was_measured(
    models: list[tuple[int, int]], measured: float
):
    assert export_memory_bytes(models) == pytest.approx(measured * GIB, rel=0.2)


def test_this_machine_has_memory():
    assert (machine_memory_bytes() or 0) > 1 << 28
