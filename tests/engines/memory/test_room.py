"""What a machine holds of a bundle's slots and context: fixed numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.files import FileEntry
from outrider.engines.bundle.states import StatesEntry
from outrider.engines.memory.room import fit_memory

GIB = 1 << 30


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    """64 slots of 32,768 tokens, of 1 MiB each, and 4 GiB of weights."""
    found = load_bundle(tiny_bundle)
    sizes = {"num_layers": 32, "num_kv_heads": 32, "head_size": 128}
    return replace(
        found,
        manifest=replace(
            found.manifest,
            target=replace(found.manifest.target, **sizes),
            draft=None,
            max_context=32_768,
            max_batch=64,
            files={
                "target/model.onnx.data": FileEntry(sha256="0" * 64, size=4 * GIB),
                # Its blocks in another layout; of both one is read.
                "target/grouped.onnx.data": FileEntry(sha256="0" * 64, size=3 * GIB),
            },
        ),
    )


@pytest.mark.parametrize(
    ("gib", "asked", "slots", "context", "words"),
    [
        (None, {}, 64, 32_768, "64 slots of 32768 tokens: 2048.0 GiB of memory where all are full"),
        (4 + 4096, {}, 64, 32_768, "2048.0 GiB"),
        # Half of 64 GiB, in eight parts.
        (
            4 + 64,
            {},
            8,
            4096,
            "8 slots of 4096 tokens: 32.0 GiB of memory where all are full; the bundle has 64 of",
        ),
        (4 + 64, {"prefix_bytes": 16 * GIB}, 8, 3072, "24.0 GiB"),
        (4 + 64, {"max_running": 2}, 2, 16_384, "32.0 GiB"),
        (4 + 64, {"max_context": 1024}, 32, 1024, "32.0 GiB"),
        (4 + 64, {"max_context": 20_000}, 1, 20_000, "1 slots of 20000"),
        (4, {}, 1, 1024, "1 slots of 1024"),
    ],
)
def test_few_slots_share_what_memory_holds(
    bundle: Bundle, gib: int | None, asked: dict[str, int], slots: int, context: int, words: str
) -> None:
    memory = None if gib is None else gib * GIB
    found, why = fit_memory(bundle, memory_bytes=memory, **{"max_running": 64} | asked)
    assert (found.manifest.max_batch, found.manifest.max_context) == (slots, context)
    assert words in why


def test_states_are_taken_off_before_tokens_are_counted(bundle: Bundle) -> None:
    """A GiB a slot, of the four that each of eight may take."""
    states = StatesEntry(
        mixers=1, kernel=1, channels=0, row=0, heads=1024, key_size=512, value_size=512, max_open=4
    )
    manifest = replace(bundle.manifest, target=replace(bundle.manifest.target, states=states))
    hybrid = replace(bundle, manifest=manifest)
    found, why = fit_memory(hybrid, memory_bytes=(4 + 64) * GIB, max_running=64)
    assert (found.manifest.max_batch, found.manifest.max_context) == (8, 3072)
    assert "32.0 GiB of memory where all are full, 8.0 GiB of it for states" in why
    assert why.endswith("; 1,000 tokens take 1000 MiB")
    found, _ = fit_memory(hybrid, memory_bytes=(4 + 64) * GIB, max_running=64, max_context=1024)
    assert found.manifest.max_batch == 16
