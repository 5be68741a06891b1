"""Checkpoints of heads: two dialects of one thing, and everything else refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engines.base import BundleError
from outrider.export.heads import checkpoint
from outrider.export.heads.checkpoint import is_head, open_head
from outrider.export.heads.model import build

from tests.export.heads.heads_models import (
    HIDDEN,
    NUM_IDS,
    THETA,
    VOCAB,
    rewrite,
    tensors_in,
    write_head,
)
from tests.mutants import assert_caught

NO_EMBEDDING = torch.zeros(VOCAB, HIDDEN)


def test_both_dialects_are_one_head(tmp_path: Path) -> None:
    plain, other = (
        open_head(write_head(tmp_path / dialect, dialect=dialect, taps=(0, 2, 3)))
        for dialect in ("plain", "speculators")
    )
    assert plain.taps == other.taps == (0, 2, 3)
    assert plain.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one, other.tensors[name]) for name, one in plain.tensors.items())
    assert plain.target_ids is not None
    assert torch.equal(plain.target_ids, other.target_ids)
    names = ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size")
    assert [getattr(plain.config, one) for one in names] == [HIDDEN, 2, 8, 1e-5, NUM_IDS]
    assert plain.config.rope_parameters == other.config.rope_parameters
    assert plain.config.rope_parameters["rope_theta"] == THETA


def test_ids_are_offsets_from_the_heads_own(tmp_path: Path) -> None:
    """Trap: read as the target's ids themselves, they would name others and nothing would say so."""
    path = write_head(tmp_path / "head")
    stored = tensors_in(path)
    ids = open_head(path).target_ids
    assert ids is not None
    assert ids.tolist() == torch.nonzero(stored["t2d"]).flatten().tolist()
    assert ids.tolist() != stored["d2t"].tolist()


def test_layers_that_nobody_names_are_those_of_the_source(tmp_path: Path) -> None:
    head = open_head(write_head(tmp_path / "head"))
    assert head.taps_of(32) == (2, 16, 29)
    with pytest.raises(BundleError, match=r"layers \[2, 1, -1\], the target has 0\.\.1"):
        head.taps_of(2)
    named = open_head(write_head(tmp_path / "named", taps=(1, 3)))
    with pytest.raises(BundleError, match=r"2 layers are named, fc\.weight reads 3"):
        named.taps_of(32)


def test_weights_in_pytorchs_form_are_read_and_code_in_it_is_not_run(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head")
    stored = tensors_in(path)
    (path / "model.safetensors").unlink()
    torch.save(stored, path / "pytorch_model.bin")
    assert open_head(path).tensors.keys() >= {"fc.weight", "layer.hidden_norm.weight"}
    torch.save({**stored, "fc.weight": Path("/")}, path / "pytorch_model.bin")
    with pytest.raises(BundleError, match="head: cannot read the weights"):
        open_head(path)
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(BundleError, match=r"no \.safetensors weights and no pytorch_model\.bin"):
        open_head(path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"medusa_num_heads": 5}, "Medusa"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"parallel_drafting": True}, "P-EAGLE"),
        ({"speculators_model_type": "mlp"}, "speculators_model_type mlp"),
    ],
)
def test_heads_of_other_kinds_are_named(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = rewrite(write_head(tmp_path / "head"), **fields)
    with pytest.raises(BundleError, match=f"head: {reason} is not served.*heads of EAGLE-3"):
        is_head(path)


def test_a_model_of_its_own_is_no_head(tmp_path: Path, tiny_checkpoints: tuple[Path, Path]) -> None:
    assert is_head(write_head(tmp_path / "head"))
    early = rewrite(write_head(tmp_path / "early"), architectures=["LlamaForCausalLM"])
    assert is_head(early)
    assert not any(map(is_head, (*tiny_checkpoints, tmp_path, tmp_path / "absent")))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"model_type": "gpt2"}, "a layer of gpt2; llama, qwen3 are read"),
        ({"hidden_size": 16}, r"fc\.weight answers 32 numbers, hidden_size is 16"),
        ({"target_hidden_size": 40}, r"reads 96 numbers, no multiple of the 40"),
    ],
)
def test_forms_that_are_not_read_are_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=f"head: .*{reason}"):
        open_head(rewrite(write_head(tmp_path / "head"), **fields))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("eagle_config", [1], "must be an object"),
        ("transformer_layer_config", "llama", "must be an object"),
        ("eagle_aux_hidden_state_layer_ids", 2, "must be a list of whole numbers from 0 on"),
        ("eagle_aux_hidden_state_layer_ids", [0, -1, 2], "must be a list of whole"),
        ("eagle_aux_hidden_state_layer_ids", [0, 1.5, 2], "must be a list of whole"),
        ("eagle_aux_hidden_state_layer_ids", ["0"], "must be a list of whole"),
        ("norm_before_residual", "false", "must be true or false, not 'false'"),
        ("norm_output", 1, "must be true or false"),
        ("target_hidden_size", 0, "must be a whole number above 0"),
        ("target_hidden_size", "32", "must be a whole number above 0"),
        ("num_attention_heads", 0, "must be a whole number above 0"),
        ("hidden_size", True, "must be a whole number above 0"),
        ("num_hidden_layers", 2, "must be 1, not 2"),
        ("hidden_act", "gelu", "must be silu, not 'gelu'"),
        ("rms_norm_eps", "small", "expected float"),
        ("rope_theta", "far", ""),
        ("rope_scaling", {"rope_type": "yarn"}, "factor"),
        ("rope_scaling", {"rope_type": "none of them"}, "none of them"),
        ("model_type", ["llama"], r"a layer of \['llama'\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:`rope")
def test_fields_that_break_their_rule_are_named(
    field: str, value: object, reason: str, tmp_path: Path
) -> None:
    """Trap: a flag of "false" is true."""
    path = rewrite(write_head(tmp_path / "head"), **{field: value})
    is_seen_by_transformers = field.startswith("ro") or field == "rms_norm_eps"
    where = "no readable config.json" if is_seen_by_transformers else f"config.json: {field}"
    where = "" if field == "model_type" else where
    with pytest.raises(BundleError, match=f"head: {where}.*{reason}"):
        open_head(path)


def test_fields_of_null_are_as_absent_ones(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head")
    fields = json.loads((path / "config.json").read_text("utf-8"))
    absent = dict.fromkeys(("target_hidden_size", "eagle_config", "norm_output", "hidden_act"))
    (path / "config.json").write_text(json.dumps(fields | absent), "utf-8")
    head = open_head(path)
    assert (head.target_hidden_size, head.norm_output) == (HIDDEN, False)
    assert head.config.hidden_act == "silu"


def test_what_names_no_architectures_is_no_head(tmp_path: Path) -> None:
    path = rewrite(write_head(tmp_path / "head"), architectures=3, draft_vocab_size=None)
    assert not is_head(path)


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "embed_tokens.weight"])
def test_matrices_of_other_axes_are_refused(name: str, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head")
    stored = tensors_in(path)
    with pytest.raises(BundleError, match=rf"head: {name} is \[\d+\], not a matrix"):
        open_head(rewrite(path, stored | {name: stored[name].flatten()}))


def test_maps_that_are_none_are_refused(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head")
    stored = tensors_in(path)
    absolute = torch.nonzero(stored["t2d"]).flatten()
    for name, changed, reason in (
        ("d2t", absolute, "t2d does not mark the ids"),
        ("d2t", stored["d2t"][1:], "lm_head.weight has 20 rows"),
        ("d2t", -torch.arange(NUM_IDS), "maps two ids to one"),
        ("t2d", ~stored["t2d"], "t2d does not mark the ids"),
    ):
        with pytest.raises(BundleError, match=reason):
            open_head(rewrite(path, stored | {name: changed.contiguous()}))


def test_tensors_are_all_read_or_refused_by_name(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head")
    stored = tensors_in(path)
    for changed, reason in (
        (stored | {"midlayer.mlp.gate_proj.bias": torch.zeros(48)}, "gate_proj.bias is not read"),
        (stored | {"input_norm.weight": torch.ones(96)}, "input_norm.weight is not read"),
        ({name: one for name, one in stored.items() if "hidden_norm" not in name}, "hidden_norm"),
        (stored | {"norm.weight": torch.ones(31)}, r"norm.weight is \[31\]"),
    ):
        with pytest.raises(BundleError, match=reason):
            build(open_head(rewrite(path, dict(changed))), VOCAB, NO_EMBEDDING)


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    head = open_head(write_head(tmp_path / "head"))
    with pytest.raises(BundleError, match=r"d2t maps to \d+, the target has 30"):
        build(head, 30, NO_EMBEDDING)
    whole = open_head(write_head(tmp_path / "whole", num_ids=VOCAB))
    with pytest.raises(BundleError, match="it has 50 ids and no d2t, the target 60"):
        build(whole, 60, NO_EMBEDDING)
    narrow = open_head(write_head(tmp_path / "narrow", has_embedding=False))
    with pytest.raises(BundleError, match=r"no embed_tokens\.weight, and the target's is 16 wide"):
        build(narrow, VOCAB, torch.zeros(VOCAB, 16))


MUTANTS = {
    "ids are absolute": (
        "ids = torch.arange(num_ids) + offsets.long()",
        "ids = offsets.long()",
        test_ids_are_offsets_from_the_heads_own,
    ),
    "outputs for inputs": (
        "(2, num_layers // 2, num_layers - 3)",
        "(3, num_layers // 2 + 1, num_layers - 2)",
        test_layers_that_nobody_names_are_those_of_the_source,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    old, new, killer = MUTANTS[name]
    assert_caught(
        monkeypatch,
        checkpoint,
        old,
        new,
        lambda: killer(tmp_path_factory.mktemp("mutant")),
        (AssertionError, BundleError),
    )
