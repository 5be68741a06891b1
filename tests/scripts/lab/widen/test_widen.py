"""Widened models answer as their sources do, and nothing in their graphs can be left out."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from outrider.export.checkpoint import open_checkpoint
from outrider.export.graph.to_onnx import export_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from scripts.lab.widen.llama import (
    Size,
    logit_difference,
    plan_heads,
    random_model,
    widen,
    widened_config,
)
from scripts.lab.widen.widen import ALLOWED_DIFFERENCE, PAIRS, write_model

DEMO = Path(__file__).resolve().parents[4] / "demo"
WIDER = Size(hidden=160, layers=3, intermediate=192, heads=8, kv_heads=4)


def tiny(*, tied: bool = True, heads: int = 4, kv_heads: int = 2) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=97, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=128, initializer_range=0.3,
        tie_word_embeddings=tied, rms_norm_eps=1e-2,
    )  # fmt: skip
    model = random_model(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "wider"),
    [
        (4, 2, WIDER),
        (6, 2, Size(hidden=96, layers=2, intermediate=96, heads=6, kv_heads=6)),
        (6, 2, Size(hidden=120, layers=2, intermediate=96, heads=20, kv_heads=5)),
        (3, 1, Size(hidden=104, layers=2, intermediate=97, heads=8, kv_heads=4)),
    ],
)
def test_a_widened_model_has_its_sources_logits(
    tied: bool, heads: int, kv_heads: int, wider: Size
) -> None:
    source = tiny(tied=tied, heads=heads, kv_heads=kv_heads)
    model = widen(source, wider)
    assert source(torch.arange(5)[None]).logits.std() > 1
    assert logit_difference(source, model) < ALLOWED_DIFFERENCE
    assert model.config.hidden_size == wider.hidden
    assert len(model.model.layers) == wider.layers
    assert model.model.layers[0].self_attn.k_proj.out_features == 16 * wider.kv_heads


def test_a_widened_model_is_wrong_without_its_norms_and_epsilon() -> None:
    source = tiny()
    for spoil in ("weight", "epsilon"):
        model = widen(source, WIDER)
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                if spoil == "weight":
                    module.weight.data *= (WIDER.hidden / 96) ** 0.5
                else:
                    module.variance_epsilon *= WIDER.hidden / 96
        assert logit_difference(source, model) > ALLOWED_DIFFERENCE, spoil


def test_shared_keys_are_copied_where_groups_shrink() -> None:
    config = LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    size = Size(hidden=1, layers=1, intermediate=1, heads=10, kv_heads=5)
    plan = plan_heads(config, size)
    assert plan.queries == (0, 1, 2, None, 3, 4, 5, None, None, None)
    assert plan.keys == (0, 0, 1, 1, None)


def test_what_cannot_be_widened_is_refused_by_name() -> None:
    config = tiny().config
    with pytest.raises(ValueError, match="hidden: 32 is below the source's 96"):
        widened_config(config, Size(hidden=32, layers=2, intermediate=96, heads=4, kv_heads=2))
    with pytest.raises(ValueError, match="hidden: 100 is no multiple"):
        widened_config(config, Size(hidden=100, layers=2, intermediate=96, heads=8, kv_heads=2))
    with pytest.raises(ValueError, match="kv_heads: at least 2"):
        plan_heads(config, Size(hidden=64, layers=2, intermediate=96, heads=4, kv_heads=1))
    with pytest.raises(ValueError, match="no multiple"):
        plan_heads(config, Size(hidden=64, layers=2, intermediate=96, heads=4, kv_heads=3))
    config.attention_bias = True
    with pytest.raises(ValueError, match="attention_bias"):
        widened_config(config, WIDER)


@pytest.mark.parametrize("name", list(PAIRS))
def test_shipped_pairs_fit_the_demo_pair_and_have_their_size(name: str) -> None:
    sizes = {
        "gptlike-125m-6m": (125, 6),
        "demo-dear-draft": (10.2, 4.2),
        "unseen-23m-2m": (23.3, 2),
        "1b-50m": (1000, 50),
    }
    wanted = sizes[name]
    for part, millions in zip(("target", "draft"), wanted, strict=True):
        size = getattr(PAIRS[name], part)
        old = LlamaConfig.from_pretrained(DEMO / part)
        plan = plan_heads(old, size)
        assert {head for head in plan.queries if head is not None} == set(
            range(old.num_attention_heads)
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(widened_config(old, size))
        assert sum(one.numel() for one in model.parameters()) / 1e6 == pytest.approx(
            millions, rel=0.03
        )


def contents(graph: onnx.GraphProto) -> tuple[Counter[str], Counter[tuple[int, ...]]]:
    """Operators and shapes of weights of a graph."""
    return (
        Counter(node.op_type for node in graph.node),
        Counter(tuple(tensor.dims) for tensor in graph.initializer),
    )


def test_onnxruntime_leaves_nothing_out_of_a_widened_graph(
    tmp_path: Path, optimised_graph: Callable[[Path], onnx.GraphProto]
) -> None:
    tiny().save_pretrained(tmp_path / "source")
    write_model(tmp_path / "source", tmp_path / "wide", WIDER, is_random=False)
    loaded = open_checkpoint(tmp_path / "wide", max_context=64).load()
    export_model(loaded, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    num_filled = 0
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim == 2 and values.size > 1000 and values.dtype == np.float32:
            noise = rng.normal(size=values.shape).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(noise, tensor.name))
            num_filled += int(np.any(values == 0))
    onnx.save(model, tmp_path / "random.onnx")
    assert num_filled > WIDER.layers
    kept = [contents(optimised_graph(tmp_path / f"{name}.onnx")) for name in ("model", "random")]
    assert kept[0] == kept[1]


def test_a_written_pair_loads_with_the_sources_logits(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    said = write_model(tiny_checkpoints[0], tmp_path / "wide", WIDER, is_random=False)
    assert "logits within" in said
    assert (tmp_path / "wide" / "tokenizer.json").exists()
    small, wide = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (tiny_checkpoints[0], tmp_path / "wide")
    )
    assert logit_difference(small, wide) < ALLOWED_DIFFERENCE
