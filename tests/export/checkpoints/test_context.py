"""The context of a bundle whose maker names none: fixed numbers."""

import pytest
from outrider.export.context import (
    MOST_CONTEXT,
    default_context,
    machine_memory_bytes,
    token_bytes,
)
from outrider.export.facts import UNLIMITED_POSITIONS, ModelFacts

GIB = 1 << 30


def facts(
    max_position: int = 131_072, window: int | None = None, num_layers: int = 32
) -> ModelFacts:
    """Sizes of Llama 3 8B unless told: 256 KiB of float32 keys and values a token."""
    return ModelFacts(
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
    assert token_bytes(facts()) == 256 << 10


@pytest.mark.parametrize(
    ("models", "max_batch", "memory", "expected", "words"),
    [
        (
            {"target": facts()},
            8,
            64 * GIB,
            16_384,
            "context 16384 of the target's 131072: 8 full slots take 32.0 GiB",
        ),
        # A draft's caches count, and 14,563 is cut to whole thousands.
        (
            {"target": facts(), "draft": facts(num_layers=4)},
            8,
            64 * GIB,
            14_336,
            "context 14336 of",
        ),
        # Caches grow with their texts, so there is a least.
        ({"target": facts()}, 64, 16 * GIB, 1024, "64 full slots take 16.0 GiB, of 16.0 GiB"),
        (
            {"target": facts(2048)},
            8,
            64 * GIB,
            2048,
            "context 2048, all of the target's 2048: 8 full",
        ),
        ({"target": facts(512)}, 64, 1 * GIB, 512, "context 512, all of the target's 512"),
        ({"target": facts(), "draft": facts(1500)}, 1, 64 * GIB, 1500, "all of the draft's 1500"),
        # A window is part of the mask: texts go beyond it.
        ({"target": facts(8192, window=4096)}, 1, 64 * GIB, 8192, "all of the target's 8192"),
        ({"target": facts()}, 1, 640 * GIB, MOST_CONTEXT, "context 65536 of the target's 131072"),
        ({"target": facts(UNLIMITED_POSITIONS)}, 1, 64 * GIB, 1024, "the target names no limit"),
        ({"target": facts()}, 64, None, MOST_CONTEXT, "64 full slots take 1024.0 GiB ("),
    ],
)
def test_the_models_own_context_is_bounded_by_memory_and_that_is_said(
    models: dict[str, ModelFacts], max_batch: int, memory: int | None, expected: int, words: str
):
    found, why = default_context(models, max_batch=max_batch, memory_bytes=memory)
    assert found == expected
    assert words in why


def test_this_machine_has_memory():
    assert (machine_memory_bytes() or 0) > 1 << 28
