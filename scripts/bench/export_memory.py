"""Memory, time and disk of exports, over two sizes of random models with 16-bit weights.

Every export runs in a process of its own, whose memory is read from ``/proc`` every few milliseconds:

* ``peak_own``: anonymous and shared pages (RssAnon + RssShmem), which nobody else can have;
* ``peak_with_files``: VmHWM, the kernel's own peak, which includes pages of mapped files. They are a cache: the kernel
  takes them back when others want memory.

From the two sizes follows what a byte of weights costs, and what every export costs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.bench.tools.results import Row, Scalar
from scripts.bench.tools.tables import markdown, show

_SAMPLE_S = 0.01
_DEVIATION = 0.02
_MIB = 1 << 20
_WORKER = """
import sys
from pathlib import Path
from outrider.export.pipeline import export_bundle
export_bundle(target=Path(sys.argv[1]), draft=None, out=Path(sys.argv[2]), weights=sys.argv[3],
              max_context=1024, progress=lambda stage: print(stage, flush=True))
"""
# Hidden size, layers, size of the MLP, heads and key-value heads; the last is a Llama 3.2 1B without its vocabulary.
SIZES = {
    "tiny": (128, 2, 256, 4, 2),
    "0.06B": (512, 16, 2048, 8, 4),
    "0.25B": (1024, 16, 4096, 16, 8),
    "1B": (2048, 16, 8192, 32, 8),
}
# Experts share the MLP's size among them, so that all kinds have as many weights.
NUM_EXPERTS = 8
KINDS: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {"sliding_window": 256},
    "mixtral": {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an export took: bytes, seconds of the clock and of the processor."""

    weight_bytes: int
    peak_own: int
    peak_with_files: int
    peak_disk: int
    bundle_bytes: int
    seconds: float
    processor_s: float


def write_checkpoint(folder: Path, kind: str, size: str, dtype: str, source: Path) -> None:
    """Write a random model of a kind and size with the tokenizer and vocabulary of the checkpoint ``source``."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    hidden, layers, intermediate, heads, kv_heads = SIZES[size]
    config = AutoConfig.for_model(
        kind,
        vocab_size=json.loads((source / "config.json").read_text())["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate // (NUM_EXPERTS if kind == "mixtral" else 1),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        dtype=dtype,
        **KINDS[kind],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(mean=float(weight.ndim == 1), std=_DEVIATION, generator=generator)
    # By its names on disk, where every expert has its own.
    model.save_pretrained(folder, max_shard_size="100GB")
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")


def measure(checkpoint: Path, out: Path, weights: str) -> Usage:
    """Export the checkpoint to ``out`` in a process of its own; return what that took.

    Raises:
        RuntimeError: the export failed.
    """
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir(parents=True)
    start = time.monotonic()
    command = [sys.executable, "-c", _WORKER, str(checkpoint), str(out), weights]
    with subprocess.Popen(command) as process:
        own = with_files = disk = 0
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            memory = _memory(process.pid)
            own = max(own, memory.get("RssAnon", 0) + memory.get("RssShmem", 0))
            with_files = max(with_files, memory.get("VmHWM", 0))
            disk = max(disk, _disk_bytes(out.parent))
            time.sleep(_SAMPLE_S)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the export ended with {process.returncode}")
    return Usage(
        weight_bytes=(checkpoint / "model.safetensors").stat().st_size,
        peak_own=own,
        peak_with_files=with_files,
        peak_disk=disk,
        bundle_bytes=_disk_bytes(out),
        seconds=time.monotonic() - start,
        processor_s=usage.ru_utime + usage.ru_stime,
    )


def _memory(pid: int) -> dict[str, int]:
    """Return a process's figures of memory in bytes, by the kernel's names."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {field[0][:-1]: int(field[1]) << 10 for field in fields if field[-1:] == ["kB"]}


def _disk_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue  # gone meanwhile
    return total


def slopes(small: Usage, large: Usage) -> dict[str, float]:
    """Return what a byte of weights costs, and the rest in GiB, of both counts of memory."""
    grown = large.weight_bytes - small.weight_bytes
    figures = {}
    for name in ("peak_own", "peak_with_files"):
        slope = (getattr(large, name) - getattr(small, name)) / grown
        figures[f"{name}_per_byte"] = slope
        figures[f"{name}_fixed_GiB"] = (getattr(small, name) - slope * small.weight_bytes) / (
            1 << 30
        )
    return figures


def main(
    work: Annotated[Path, typer.Option(help="folder for checkpoints and bundles")],
    size: Annotated[list[str], typer.Option(help=f"of {', '.join(SIZES)}")] = ["0.25B", "1B"],  # noqa: B006
    weights: Annotated[list[str], typer.Option()] = ["float16", "int8", "int4"],  # noqa: B006
    dtype: Annotated[str, typer.Option(help="of the checkpoint")] = "float16",
    kind: Annotated[str, typer.Option(help=f"of {', '.join(KINDS)}")] = "llama",
    source: Path = Path("demo/target"),
) -> None:
    """Export every size with every kind of weights; print what each took, as a table and in Markdown."""
    rows, lines = [], []
    for stored in weights:
        found: list[Usage] = []
        for one in size:
            checkpoint = work / f"{kind}-{one}-{dtype}"
            write_checkpoint(checkpoint, kind, one, dtype, source)
            usage = measure(checkpoint, work / "out" / "bundle", stored)
            shutil.rmtree(work / "out")
            found.append(usage)
            print(kind, one, stored, json.dumps(asdict(usage)), flush=True)
            figures: dict[str, Scalar] = {
                f"{name}_MiB": value // _MIB if isinstance(value, int) else None
                for name, value in asdict(usage).items()
                if isinstance(value, int)
            }
            figures |= {
                "seconds": round(usage.seconds, 1),
                "processor_s": round(usage.processor_s, 1),
            }
            rows.append(Row(case={"kind": kind, "size": one, "weights": stored}, figures=figures))
        if len(found) > 1:
            lines.append(
                Row(
                    case={"kind": kind, "weights": stored},
                    figures=dict(slopes(found[0], found[-1])),
                )
            )
    for table in filter(None, (rows, lines)):
        show(table)
        print(markdown(table))


if __name__ == "__main__":
    typer.run(main)
