"""What bundles lose on a text that no calibration saw, beside a reference: perplexity, likeliest token, KL divergence.

The text is the language reference that Python's ``pydoc_data.topics`` holds; its hash is printed. Windows of 512 tokens
lie evenly over it. The reference is a bundle of the checkpoint's own values (``--weights half``: float32 on the CPU,
certified). Of its distributions the 256 likeliest tokens are kept and all others count as one, so the KL divergence is
a lower bound, by little. Intervals are bootstrapped over windows, in pairs. Every window is written when it is done,
and a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from outrider.engines.base import Engine, FloatArray, IntArray, Span
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_engine
from tokenizers import Tokenizer

WINDOW, NUM_KEPT, NUM_SAMPLES = 512, 256, 2000


def read_windows(tokenizer: Path, num_positions: int) -> tuple[IntArray, str]:
    """Return windows [B, 512] int64 of the text, and its name with its hash."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids
    count = -(-num_positions // (WINDOW - 1))
    starts = np.linspace(0, len(ids) - WINDOW, count).astype(np.int64)
    name = f"pydoc_data.topics sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return np.stack([np.array(ids[start : start + WINDOW], np.int64) for start in starts]), name


def log_probs(engine: Engine, window: IntArray) -> FloatArray:
    """Return log-probabilities [511, V] float32 of each next token."""
    tokens = tuple(window[:-1].tolist())
    count = len(tokens)
    span = Span(slot=0, start=0, tokens=tokens, num_logits=count, num_settled=count)
    logits = engine.extend([span])[0]
    logits = logits - logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def measure(engine: Engine, window: IntArray, kept: Path) -> FloatArray:
    """Return nats lost by the bundle and by the reference, agreement and KL, [511, 4]; ``kept`` is the reference's.

    Where ``kept`` is missing the engine is the reference, and it is written.
    """
    found = log_probs(engine, window)
    places = np.arange(len(found))
    nats = -found[places, window[1:]]
    if not kept.exists():
        ids = np.argpartition(found, -NUM_KEPT, axis=1)[:, -NUM_KEPT:].astype(np.int32)
        np.savez(kept, nats=nats, ids=ids, values=np.take_along_axis(found, ids, 1))
    with np.load(kept) as held:
        expected, ids, values = held["nats"], held["ids"], held["values"]
    mine, theirs = np.take_along_axis(found, ids, 1).astype(np.float64), values.astype(np.float64)
    rest, mine_rest = (np.maximum(1 - np.exp(one).sum(1), 1e-9) for one in (theirs, mine))
    kl = (np.exp(theirs) * (theirs - mine)).sum(1) + rest * np.log(rest / mine_rest)
    equal = found.argmax(1) == ids[places, values.argmax(1)]
    return np.stack([nats, expected, equal, kl], axis=1).astype(np.float32)


def summary(windows: FloatArray) -> str:
    """Return ratio of perplexities, agreement and KL with 95 % intervals, of windows [B, 511, 4]."""
    means = windows.mean(axis=1, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(0, len(means), (NUM_SAMPLES, len(means)))
    samples = np.concatenate([means.mean(0, keepdims=True), means[drawn].mean(1)])
    figures = {
        "perplexity / reference": np.exp(samples[:, 0] - samples[:, 1]),
        "same likeliest token": samples[:, 2],
        "KL, nats": samples[:, 3],
    }
    cells = []
    for name, values in figures.items():
        low, high = np.percentile(values[1:], [2.5, 97.5])
        cells.append(f"{name} {values[0]:.4f} [{low:.4f}, {high:.4f}]")
    return f"perplexity {np.exp(samples[0, 0]):.3f}; " + "; ".join(cells)


def main() -> None:
    """Measure bundles one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for what is done")
    parser.add_argument("reference", type=Path, help="bundle of the checkpoint's own values")
    parser.add_argument("bundles", type=Path, nargs="*")
    parser.add_argument("--positions", type=int, default=20_000)
    parser.add_argument("--part", choices=("target", "draft"), default="target")
    options = parser.parse_args()
    windows, text = read_windows(options.reference / "tokenizer.json", options.positions)
    print(f"{text}, {len(windows) * (WINDOW - 1)} positions")
    stem = f"{options.reference.name}.{options.part}.{len(windows)}"
    kept = options.work / stem
    kept.mkdir(parents=True, exist_ok=True)
    for path in (options.reference, *options.bundles):
        results, engine = [], None
        for number, window in enumerate(windows):
            done = kept / f"{path.name}.{number}.npy"
            if not done.exists():
                if engine is None:
                    engine = open_engine(load_bundle(path), options.part, max_batch=1)
                np.save(done, measure(engine, window, kept / f"reference.{number}.npz"))
            results.append(np.load(done))
        print(f"{path.name} {options.part}: {summary(np.stack(results))}", flush=True)
        del engine


if __name__ == "__main__":
    main()
