"""onnxruntime-genai's plain decoding of a checkpoint, with its own graph: on a GPU in 16 bits, on a host in 32."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_PROMPT_TOKENS, _NEW_TOKENS, _ROUNDS = 200, 64, 3


def time_genai(
    checkpoint: Path, work: Path, *, on_gpu: bool, num_tokens: int = _NEW_TOKENS
) -> Mapping[str, Any]:
    """Return tokens per second of one row and of eight, and the library's version.

    Raises:
        ImportError: onnxruntime-genai is not installed.
        CalledProcessError: its builder refuses the checkpoint.
    """
    import onnxruntime_genai as library

    if not (work / "genai_config.json").exists():
        kind = ["-p", "fp16", "-e", "cuda"] if on_gpu else ["-p", "fp32", "-e", "cpu"]
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint)]
        subprocess.run([*command, "-o", str(work), *kind, "-c", str(work / "cache")], check=True)
    config = work / "genai_config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    content["model"]["eos_token_id"] = []  # no token ends an answer
    config.write_text(json.dumps(content), encoding="utf-8")
    model = library.Model(str(work))
    vocab_size = content["model"]["vocab_size"]
    prompts = np.random.default_rng(0).integers(1, vocab_size, (8, _PROMPT_TOKENS), dtype=np.int32)
    found: dict[str, Any] = {"version": library.__version__}
    for rows in (1, 8):
        seconds = [_decode_s(library, model, prompts[:rows], num_tokens) for _ in range(_ROUNDS)]
        found[f"tokens_per_s_{rows}"] = rows * (num_tokens - 1) / statistics.median(seconds)
    return found


def _decode_s(library: Any, model: Any, prompts: np.ndarray, num_tokens: int) -> float:
    """Seconds of all tokens but the first, which the prompt gives."""
    params = library.GeneratorParams(model)
    params.set_search_options(
        do_sample=False, max_length=prompts.shape[1] + num_tokens, batch_size=len(prompts)
    )
    generator = library.Generator(model, params)
    generator.append_tokens(prompts)
    generator.generate_next_token()
    began_s = time.perf_counter()
    while not generator.is_done():
        generator.generate_next_token()
    return time.perf_counter() - began_s
