"""What the export makes of twelve tiny models: each graph's operators, names outside and shapes, and greedy tokens."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import onnx
from outrider import SamplingParams
from outrider.export.pipeline import ExportOptions, export_bundle
from outrider.runtime.offline.llm import LLM

from scripts.check_parity import random_model
from tests.conftest import VOCAB_SIZE, write_llama, write_t5, write_tokenizer

LLAMA: dict[str, Any] = {"max_context": 64, "max_batch": 2, "max_gamma": 3, "max_tree_nodes": 0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: ("llama", {**LLAMA, "weights": kind}) for kind in ("float32", "half", "int8", "int4", "w8a8")},
    "pair": ("llama", {**LLAMA, "has_draft": True}),
    "trees": ("llama", {**LLAMA, "max_tree_nodes": 8}),
    "t5": ("t5", {**LLAMA, "max_source": 16}),
    **{family: (family, LLAMA) for family in ("gpt2", "gemma3_text", "qwen3", "gpt_neox")},
}  # fmt: skip


def write_model(family: str, folder: Path) -> None:
    if family == "llama":
        write_llama(folder, num_layers=2, hidden_size=64, seed=1)
    elif family == "t5":
        write_t5(folder, num_layers=2, hidden_size=32, seed=1)
    else:
        random_model(family, 256, vocab_size=VOCAB_SIZE).save_pretrained(folder)
        write_tokenizer(folder)


def structure(path: Path) -> str:
    """Return a hash of a graph, but for the values of its weights, names inside it and the order of its nodes.

    Gemma 3 computes what its kinds of layers share in the order of a set, which each process has its own of.
    """
    graph = onnx.load(path, load_external_data=False).graph
    made_by = {name: node for node in graph.node for name in node.output}
    weights = {one.name: f"{one.data_type} {[*one.dims]}" for one in graph.initializer}
    ids, ahead = {"": 0}, [one.name for one in reversed(graph.output)]
    while ahead:
        if (name := ahead.pop()) not in ids:
            ids[name] = len(ids)
            ahead += reversed(made_by[name].input if name in made_by else ())
    lines = [str(one) for one in (*graph.input, *graph.output)]
    # Also of what no output comes from.
    lines += sorted(f"{node.domain} {node.op_type}" for node in graph.node)
    lines += sorted(weights.values())
    for name in ids:
        if name in made_by:
            node = made_by[name]
            attributes = sorted((one.name, one.type) for one in node.attribute)
            of = [ids.get(one) for one in node.output], [ids[one] for one in node.input]
            lines.append(f"{node.domain} {node.op_type} {of} {attributes}")
        elif name:
            lines.append(f"{ids[name]} {weights.get(name, name)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def bundle(name: str) -> dict[str, Any]:
    """Export a variant; return its files, its graphs' hashes and greedy tokens."""
    family, options = VARIANTS[name]
    options = dict(options)
    with tempfile.TemporaryDirectory() as scratch:
        target, root = Path(scratch) / "target", Path(scratch) / "bundle"
        write_model(family, target)
        draft = None
        if options.pop("has_draft", False):
            draft = Path(scratch) / "draft"
            write_llama(draft, num_layers=1, hidden_size=32, seed=2)
        wanted = ExportOptions(**options)
        export_bundle(target=target, draft=draft, out=root, options=wanted, progress=lambda _: None)
        files = sorted(str(one.relative_to(root)) for one in root.rglob("*") if one.is_file())
        graphs = {one: structure(root / one) for one in files if one.endswith(".onnx")}
        with LLM(root, device="cpu", gamma=0, drafter="lookup") as llm:
            (answer,) = llm.generate(
                [[5, 9, 7, 30]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            )
        keys = sorted(json.loads((root / "manifest.json").read_text()))
    return {
        "files": files,
        "graphs": graphs,
        "manifest": keys,
        "greedy": answer.outputs[0].token_ids,
    }


def bundles() -> dict[str, Any]:
    return {name: bundle(name) for name in VARIANTS}
