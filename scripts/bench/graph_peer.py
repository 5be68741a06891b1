"""One target step of our exported graphs against that of onnxruntime-genai's model builder, same weights.

Exports the demo target and a random Llama of 97M parameters, lets the peer's builder (in its own environment)
make its graph of the same checkpoints, and times both in turn in one process: same onnxruntime, same pool, both on
huge pages where the system has them. Ours is the graph that a CPU serves: ``grouped.onnx`` where there is one.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from outrider.engines.base import FloatArray
from outrider.engines.bundle.manifest import GROUPED_FILE, MODEL_FILE
from outrider.engines.huge_pages import use_everywhere
from rich.console import Console
from rich.progress import track
from rich.table import Table

from scripts.bench.tools.graph_steps import GraphRun, Shape, interleaved_times, medians, timed_step
from scripts.bench.tools.results import Recorder, Row, Scalar

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ("float32", "int8")
WANTED_RATIO = 1.15
_SEED = 0


def make_llama(folder: Path) -> None:
    """Save a random Llama of 97M parameters (768 wide, 12 layers, tied head) to ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=16_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # the peer's builder wants some
        shutil.copy(ROOT / "demo" / "target" / name, folder)


def export_ours(checkpoint: Path, out: Path, weights: str) -> None:
    """Our graphs of a checkpoint, ``out``/model.onnx and where heads share caches ``out``/grouped.onnx."""
    from outrider.export.checkpoint import open_checkpoint
    from outrider.export.graph.grouped_heads import derive_grouped_graph
    from outrider.export.graph.to_onnx import export_model
    from outrider.export.weights.blocks import quantize_file

    export_model(open_checkpoint(checkpoint, max_context=1024).load(), out / MODEL_FILE)
    if weights != "float32":
        quantize_file(out / MODEL_FILE, weights)
    derive_grouped_graph(out / MODEL_FILE)


def build_peer(checkpoint: Path, out: Path, weights: str) -> None:
    """The peer's graph of a checkpoint, ``out``/model.onnx."""
    build = ROOT / "scripts" / "peers" / "genai" / "build"
    done = subprocess.run(
        ["bash", str(build), str(checkpoint), str(out), weights], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"bench_graph_peer: the peer's build failed:\n{done.stderr[-2000:]}")


def prepare(work: Path, models: dict[str, Path]) -> None:
    """Make every graph that ``work`` lacks."""
    if not (models["97M"] / "config.json").exists():
        make_llama(models["97M"])
    pairs = [(name, weights) for name in models for weights in WEIGHTS]
    for name, weights in track(pairs, "building graphs"):
        for who, build in (("ours", export_ours), ("genai", build_peer)):
            out = work / f"{who}-{name}-{weights}"
            if not (out / "done").exists():
                shutil.rmtree(out, ignore_errors=True)
                build(models[name], out, weights)
                (out / "done").touch()


def compare(paths: list[Path], shape: Shape, repeats: int, threads: int) -> dict[str, Scalar]:
    """Figures of one row: both medians, the median ratio of steps beside each other, and how far the logits agree."""
    runs = [GraphRun(path, capacity=shape.capacity, threads=threads) for path in paths]
    # Without them a graph is up to a fifth slower or quicker by where its weights happen to lie.
    use_everywhere()
    vocab_size = _vocab_size(paths[1].parent)
    total = shape.length + shape.num_tokens
    tokens = np.random.default_rng(_SEED).integers(2, vocab_size, total)
    times = interleaved_times([timed_step(run, tokens, shape) for run in runs], repeats)
    ours, peers = medians(times)
    ratio = statistics.median(mine / other for mine, other in zip(*times, strict=True))
    logits = [run.logits(tokens[shape.length :], shape.length) for run in runs]
    return {"ours_ms": ours, "genai_ms": peers, "ratio": ratio, **agreement(*logits)}


def agreement(ours: FloatArray, peers: FloatArray) -> dict[str, Scalar]:
    """Greatest and relative root mean square difference of logits [T, V], and equal best tokens."""
    difference = ours - peers
    spread = np.sqrt((difference**2).mean() / (peers - peers.mean()).var())
    equal = int((ours.argmax(-1) == peers.argmax(-1)).sum())
    return {
        "max_difference": float(np.abs(difference).max()),
        "rms_difference": float(spread),
        "same_best_share": equal / len(ours),
    }


def served_graph(folder: Path) -> Path:
    """The graph of a folder that a CPU serves."""
    grouped = folder / GROUPED_FILE
    return grouped if grouped.exists() else folder / MODEL_FILE


def cells_of(figures: Mapping[str, Scalar]) -> list[str]:
    """Figures as they are shown; a ratio above the wanted one is marked."""
    mark = "" if float(figures["ratio"] or 0) <= WANTED_RATIO else " (above)"
    return [
        *(f"{figures[name]:.3f}" for name in ("ours_ms", "genai_ms")),
        f"{figures['ratio']:.3f}{mark}",
        *(f"{figures[name]:.1e}" for name in ("max_difference", "rms_difference")),
        f"{figures['same_best_share']:.0%}",
    ]


def _vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "genai_config.json").read_text())["model"]["vocab_size"])


def main(
    work: Annotated[
        Path, typer.Argument(help="folder for checkpoints and graphs; remove it to export anew")
    ],
    repeats: int = 200,
    length: int = 200,
    capacity: int = 256,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Print ours / genai's per model, weights and tokens; medians of steps that take turns."""
    recorder = Recorder("graph_peer", "one step of our graphs and of onnxruntime-genai's", threads)
    rows = []
    models = {"demo": ROOT / "demo" / "target", "97M": work / "llama-97M"}
    prepare(work, models)
    headings = ("model", "weights", "T", "ours ms", "genai ms", "ratio")
    table = Table(
        *headings, "max |diff|", "rms diff", "same best", caption=f"wanted: ratio <= {WANTED_RATIO}"
    )
    for name in models:
        for weights in WEIGHTS:
            paths = [served_graph(work / f"{who}-{name}-{weights}") for who in ("ours", "genai")]
            for num_tokens in (2, 5):
                shape = Shape(num_tokens, length, capacity)
                figures = compare(paths, shape, repeats, threads)
                table.add_row(name, weights, str(num_tokens), *cells_of(figures))
                case = {"model": name, "weights": weights, "num_tokens": num_tokens}
                rows.append(Row(case=case, figures=figures))
    Console().print(table)
    recorder.write(json_out, rows, {"repeats": repeats, "length": length, "capacity": capacity})


if __name__ == "__main__":
    typer.run(main)
