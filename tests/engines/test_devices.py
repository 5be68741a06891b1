import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.devices import (
    Choice,
    Device,
    choose,
    integer_sums_overflow,
    parse_device,
    threads_of,
)
from outrider.engines.onnx import session
from outrider.engines.opening import choose_device, open_engine

from tests.export.weights.integer_sums import overflow


def probes(**missing: str) -> dict[str, Callable[[int], str]]:
    """Probes that answer the same for every GPU."""
    return {kind: lambda index, text=text: text for kind, text in missing.items()}


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("auto", None),
        ("cpu", Device("cpu")),
        ("cuda", Device("cuda", 0)),
        ("cuda:3", Device("cuda", 3)),
        ("tensorrt:1", Device("tensorrt", 1)),
    ],
)
def test_a_device_is_read_and_written(text: str, device: Device | None) -> None:
    assert parse_device(text) == device
    if device is not None:
        assert parse_device(str(device)) == device


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cpu:0", "cuda:1x", "CPU"])
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(EngineError, match=r"must be cpu, cuda\[:N\], tensorrt\[:N\] or auto"):
        parse_device(text)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({"tensorrt": "", "cuda": ""}, Choice(Device("tensorrt"), "the best that is present")),
        (
            {"tensorrt": "no plan", "cuda": ""},
            Choice(Device("cuda"), "the best that is present; no tensorrt (no plan)"),
        ),
        (
            {"tensorrt": "no plan", "cuda": "no driver"},
            Choice(Device("cpu"), "no tensorrt (no plan); no cuda (no driver)"),
        ),
    ],
)
def test_auto_takes_the_best_and_says_why(missing: dict[str, str], expected: Choice) -> None:
    assert choose("auto", probes(**missing)) == expected


def test_a_device_asked_for_is_not_replaced() -> None:
    absent = probes(tensorrt="no plan", cuda="no driver")
    with pytest.raises(EngineError, match="device cuda:2: no driver"):
        choose("cuda:2", absent)
    assert choose("cpu", absent) == Choice(Device("cpu"), "asked for")


def test_the_number_of_the_gpu_is_probed() -> None:
    with pytest.raises(EngineError, match="device tensorrt:5: not 5"):
        choose("tensorrt:5", {"tensorrt": lambda index: f"not {index}"})


def test_auto_serves_a_bundle_without_plans_from_what_there_is(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    choice = choose_device("auto", bundle)
    assert choice.device.kind in ("cpu", "cuda")
    assert "tensorrt" in choice.reason
    assert open_engine(bundle, "target", device="auto").limits.vocab_size == 512


def machine(root: Path, siblings: list[str], quota: str | None) -> Path:
    """Files of a machine whose processor n shares a core with ``siblings[n]``."""
    for number, text in enumerate(siblings):
        folder = root / "devices" / "system" / "cpu" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    if quota is not None:
        (root / "fs" / "cgroup").mkdir(parents=True)
        (root / "fs" / "cgroup" / "cpu.max").write_text(f"{quota}\n")
    return root


@pytest.mark.parametrize(
    ("siblings", "quota", "allowed", "threads"),
    [
        (["0", "1", "2", "3"], None, {0, 1, 2, 3}, 4),
        (["0-1", "0-1", "2-3", "2-3"], "max 100000", {0, 1, 2, 3}, 2),
        (["0,2", "1,3", "0,2", "1,3"], None, {0, 2, 3}, 2),
        (["0", "1", "2", "3"], "250000 100000", {0, 1, 2, 3}, 2),
        (["0", "1", "2", "3"], "50000 100000", {0, 1, 2, 3}, 1),
        (["0", "1", "2", "3"], "800000 100000", {0, 1, 2}, 3),
        (["0", "1"], "nonsense", {0, 1}, 2),
        ([], None, {0, 1, 5}, 3),
    ],
)
def test_a_core_has_one_thread(
    siblings: list[str],
    quota: str | None,
    allowed: set[int],
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    system = machine(tmp_path, siblings, quota)
    assert threads_of(0, system) == threads
    assert threads_of(7, system) == 7


def test_engines_opened_beside_one_another_set_the_pool_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library refuses to set it twice, and a cache lets in whoever comes while the first is at it."""
    calls: list[int] = []
    other = threading.Thread(target=session._share_thread_pool, args=(97,))

    def set_sizes(num_threads: int, num_apart: int) -> None:
        calls.append(num_threads)
        if len(calls) == 1:
            other.start()
            assert session._POOL_LOCK.locked()

    monkeypatch.setattr(session.onnxruntime, "set_global_thread_pool_sizes", set_sizes)
    session._share_thread_pool(97)
    other.join()
    assert calls == [97]


def test_integer_sums_overflow_where_the_library_says_so() -> None:
    assert integer_sums_overflow() == overflow()


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "fpu avx2 fma", True),
        ("x86_64", "fpu avx2 avx_vnni", False),
        ("x86_64", "fpu avx2 avx512_vnni", False),
        ("aarch64", "fpu avx2", False),
    ],
)
def test_a_processor_is_judged_by_its_flags(
    tmp_path: Path, machine: str, flags: str, expected: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: any\nflags\t\t: {flags}\n\n")
    assert integer_sums_overflow(machine, cpuinfo) == expected


def test_sums_of_an_unknown_processor_are_right(tmp_path: Path) -> None:
    assert not integer_sums_overflow("x86_64", tmp_path / "missing")
