"""Parts for an isolated machine: code of other GPUs goes, parts are small and unpack to what was packed."""

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from scripts.gpu.package import (
    SITE,
    keep_architecture,
    main,
    open_over_stubs,
    unpack_parts,
    write_parts,
)
from scripts.gpu.stubs.environment import NoEnvironmentError


def entry(architecture: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", 2, 1, 64, len(code)) + bytes(12) + struct.pack("<I", architecture)
    return head.ljust(64, b"\1") + code


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_code_of_other_gpus_becomes_zeros_and_nothing_else_changes() -> None:
    begin, end = b"library" + struct.pack("<I", 0xBA55ED50) + b"no fat binary", b"the end"
    codes = {80: b"a" * 50, 90: b"b" * 70, 120: b"c" * 30}
    whole = begin + fat_binary(*(entry(*one) for one in codes.items()))
    whole += fat_binary(entry(90, b"d" * 20)) + end
    data = bytearray(whole)
    assert keep_architecture(data, 90) == 80
    assert data == whole.replace(codes[80], bytes(50)).replace(codes[120], bytes(30))
    with pytest.raises(ValueError, match="architecture 75: the provider has no code for it"):
        keep_architecture(bytearray(whole), 75)


def test_code_that_no_graph_uses_becomes_zeros_too() -> None:
    codes = [fat_binary(entry(80, b"a" * 50), entry(90, code * 30)) for code in (b"b", b"c", b"d")]
    data = bytearray(b"".join(codes))
    assert keep_architecture(data, 90, ([0, 2], 3)) == 3 * 50 + 30
    assert b"b" * 30 in data
    assert b"c" * 30 not in data
    assert b"d" * 30 in data
    with pytest.raises(ValueError, match="3 fat binaries, 4 were expected"):
        keep_architecture(data, 90, ([0], 4))


def test_parts_are_small_and_unpack_to_what_was_packed(tmp_path: Path) -> None:
    folder, out, again = (tmp_path / name for name in ("folder", "out", "again"))
    (folder / "site").mkdir(parents=True)
    noise = np.random.default_rng(0).bytes(5000)
    (folder / "site" / "library.so").write_bytes(noise)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model").write_bytes(b"weights")
    (folder / "bundle").symlink_to(tmp_path / "elsewhere")
    parts = write_parts(folder, out, part_bytes=2000)
    assert [part.stat().st_size for part in parts[:-1]] == [2000] * (len(parts) - 1)
    assert len(parts) == 3
    assert len((out / "SHA256SUMS").read_text().splitlines()) == 3
    unpack_parts(out, again)
    assert (again / "site" / "library.so").read_bytes() == noise
    assert (again / "bundle" / "model").read_bytes() == b"weights"


def test_a_wheel_for_another_python_is_packed_and_not_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "onnxruntime_gpu-1.0-cp27-cp27m-manylinux_2_28_x86_64.whl"
    provider = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(provider, fat_binary(entry(90, b"code")))
    (tmp_path / "bundle").mkdir()
    out, again = tmp_path / "made" / "out", tmp_path / "again"
    main(tmp_path / "bundle", wheel, out, architecture=90)
    unpack_parts(out, again)
    assert (again / SITE / provider).is_file()
    assert capsys.readouterr().out.endswith(
        f"not opened here: {wheel.name} is for another Python\n"
    )


def test_a_bundle_without_graphs_for_gpus_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "bundle" / "target").mkdir(parents=True)
    (tmp_path / "bundle" / "target" / "model.onnx").touch()
    with pytest.raises(
        NoEnvironmentError, match=r"the bundle has no device\.onnx; export it again"
    ):
        open_over_stubs(tmp_path)
