"""Bundles of tiny random encoder-decoder models, with all graphs of the host: as the exporter makes them."""

from collections.abc import Sequence
from pathlib import Path

from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import (
    Bundle,
    Manifest,
    ModelEntry,
    load_bundle,
    write_manifest,
)
from outrider.engines.bundle.text2text import SourceEntry, TextToText
from outrider.export.checkpoint import model_facts
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.narrow_spans import NARROWEST_SPAN
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.trees import derive_tree_graphs
from transformers import PreTrainedModel


def write_exported(
    root: Path,
    model: PreTrainedModel,
    *,
    max_context: int = 64,
    max_extend: int = 32,
    max_source: int = 150,
    max_batch: int = 8,
    graphs: Sequence[str] = ("grouped", "trees"),
) -> Bundle:
    """Return a bundle of a model, without a draft; ``graphs`` are derived beside ``model.onnx``."""
    facts = model_facts(model.config)
    assert facts.source is not None
    path = root / "target" / "model.onnx"
    path.parent.mkdir(parents=True)
    export_model(
        model, path, num_positions=max_context + max_extend, num_source_positions=max_source
    )
    if "grouped" in graphs:
        assert derive_grouped_graph(path)
    if "trees" in graphs:
        derive_tree_graphs(path)
    (root / "tokenizer.json").write_text("{}")
    entry = ModelEntry(
        path="target",
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_size=facts.head_size,
        vocab_size=facts.vocab_size,
        weights="float32",
        max_tree_nodes=9 if "trees" in graphs else 0,
        narrowest_span=NARROWEST_SPAN,
        source=SourceEntry(
            num_heads=facts.source.num_heads,
            head_size=facts.source.head_size,
            max_source=max_source,
            vocab_size=facts.source.vocab_size,
            hidden_size=facts.source.hidden_size,
        ),
    )
    manifest = Manifest(
        target=entry,
        draft=None,
        max_context=max_context,
        max_batch=max_batch,
        max_gamma=4,
        max_extend=max_extend,
        eos_token_ids=(1,),
        bos_token_id=None,
        files=hash_files(root),
        text2text=TextToText(decoder_prefix=(0,), source_template=("text",)),
    )
    write_manifest(root, manifest)
    return load_bundle(root)
