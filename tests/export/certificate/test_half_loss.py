"""What PyTorch loses in 16 bits, and where it overflows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.export.certificate.half_loss import half_bound, half_logits
from outrider.export.certificate.reference import Reference
from outrider.export.checkpoint import open_checkpoint
from outrider.export.part import halved_logits, make_part
from transformers import AutoModelForCausalLM

from tests.addons import needs_accelerators


def stored(source: Path, out: Path, dtype: torch.dtype, *, factor: float = 1.0) -> Path:
    """The checkpoint with weights of another type, its last layer's products larger."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "up_proj" in name:
            parameter.data *= factor
    model.to(dtype).save_pretrained(out)
    (out / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return out


def test_pytorch_loses_eight_times_as_much_in_bfloat16(tiny_checkpoints: tuple[Path, Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints[0], max_context=64)
    reference = Reference(checkpoint.load())
    narrow, wide = (
        half_bound(
            reference, half_logits(checkpoint, kind, max_gamma=4), checkpoint, max_gamma=4
        ).value
        for kind in ("float16", "bfloat16")
    )
    assert 4 < wide / narrow < 16
    assert 0.02 < narrow < 0.2


def test_where_float16_overflows_it_is_refused_and_integers_get_bfloat16(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    path = stored(tiny_checkpoints[1], tmp_path / "large", torch.float32, factor=1e6)
    checkpoint = open_checkpoint(path, max_context=64)
    assert checkpoint.half_precision() == "float16"
    with pytest.raises(
        BundleError, match="PyTorch overflows in float16; export with --weights bfloat16"
    ):
        halved_logits(make_part("target", checkpoint, "half"), 4)
    precision, logits = halved_logits(make_part("target", checkpoint, "int8"), 4)
    assert precision == "bfloat16"
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("weights", ["half", "int4"])
@needs_accelerators
def test_a_checkpoint_in_bfloat16_is_served_in_bfloat16(
    tiny_checkpoints: tuple[Path, Path],
    tmp_path: Path,
    export_small: Callable[..., Bundle],
    weights: str,
) -> None:
    """Its weights are the checkpoint's own bits, and accelerators lose no more than PyTorch does."""
    path = stored(tiny_checkpoints[1], tmp_path / "narrow", torch.bfloat16)
    bundle = export_small(target=path, weights=weights, max_tree_nodes=0)
    target = bundle.manifest.target
    assert (target.weights, target.device_precision) == (
        "bfloat16" if weights == "half" else weights,
        "bfloat16",
    )
    certificate = bundle.manifest.certificate["target"][target.weights]
    judged = certificate["device" if weights == "half" else "device_rounding"]
    assert 1e-3 < judged["rollback"]["max_difference"] < judged["tolerance"] < 1
    assert judged["rollback"]["num_greedy_equal"] > 0.8 * judged["rollback"]["num_compared"]
    if weights == "half":
        assert certificate["rollback"]["max_difference"] < 1e-4
