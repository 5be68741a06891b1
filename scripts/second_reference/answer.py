"""Runs in optimum-onnx's environment: exports a checkpoint by its own exporter, and writes the logits of prompts.

python answer.py CHECKPOINT TASK PROMPTS.npz LOGITS.npy: prompts are ``tokens`` [B, T] int64 and, of a model with an
encoder, ``source`` [B, L] int64.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from optimum.exporters.onnx import main_export


def run(path: Path, known: dict) -> np.ndarray:
    """Return a graph's first output; inputs are taken by name, and those of no name are refused."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {one.name: known[one.name] for one in session.get_inputs()})[0]


def main(checkpoint: str, task: str, prompts: str, out: str) -> None:
    """Export, run, and write logits [B, T, V] float32."""
    given = np.load(prompts)
    tokens = given["tokens"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        main_export(checkpoint, output=folder, task=task, do_validation=False)
        if "source" in given:
            source = given["source"]
            read = np.ones_like(source)
            known = {"input_ids": source, "attention_mask": read}
            hidden = run(folder / "encoder_model.onnx", known)
            known = {
                "input_ids": tokens,
                "encoder_hidden_states": hidden,
                "encoder_attention_mask": read,
            }
            logits = run(folder / "decoder_model.onnx", known)
        else:
            positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
            known = {
                "input_ids": tokens,
                "attention_mask": np.ones_like(tokens),
                "position_ids": np.ascontiguousarray(positions),
            }
            logits = run(folder / "model.onnx", known)
    np.save(out, logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
