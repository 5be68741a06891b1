"""Bundles are signed and verified by commands, and a refusal is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from outrider.engines.bundle.manifest import write_manifest
from outrider.engines.bundle.signatures import fingerprint_of, read_signers
from outrider.runtime.cli.main import app
from outrider.runtime.cli.refusals import EXIT_REFUSED
from outrider.runtime.cli.signing import say_stale
from typer.testing import CliRunner

from tests.engines.bundle.test_manifest import make_manifest, root

__all__ = ["root"]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def signed(root: Path) -> Path:
    """A signed bundle, with the key pair beside it."""
    made = run("key", "new-signer", root.parent / "private.pem", root.parent / "public.pem")
    assert made.exit_code == 0, made.output
    (signer,) = read_signers(root.parent / "public.pem")
    result = run("sign", root, "--key", root.parent / "private.pem")
    assert result.output == f"signed by {fingerprint_of(signer)}\n"
    return root


def test_a_signed_bundle_is_verified_with_all_of_its_files(signed: Path):
    result = run("verify", signed, "--trusted", signed.parent / "public.pem")
    assert result.exit_code == 0, result.output
    assert "3 files as declared" in result.stdout


def test_a_bundle_that_does_not_fit_its_manifest_is_not_signed(root: Path, signed: Path):
    before = (root / "manifest.sig").read_bytes()
    (root / "tokenizer.json").write_text("[]")
    result = run("sign", root, "--key", root.parent / "private.pem")
    assert result.exit_code == EXIT_REFUSED
    assert result.stderr.startswith("outrider: tokenizer.json: content differs")
    assert (root / "manifest.sig").read_bytes() == before


@pytest.mark.parametrize("command", [("verify", "--trusted"), ("serve", "--trusted-signers")])
def test_an_untrusted_bundle_is_refused_in_a_line(signed: Path, command: tuple[str, str]):
    name, option = command
    (signed / "manifest.sig").unlink()
    result = run(name, signed, option, signed.parent / "public.pem")
    assert result.exit_code == EXIT_REFUSED
    lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
    assert lines == ["outrider: manifest.sig: missing: the bundle is not signed (outrider sign)"]


@pytest.mark.parametrize("command", [("verify", "--trusted"), ("serve", "--trusted-signers")])
def test_a_file_of_signers_that_does_not_parse_is_refused_in_a_line(
    signed: Path, command: tuple[str, str]
):
    name, option = command
    result = run(name, signed, option, signed / "tokenizer.json")
    assert result.exit_code == EXIT_REFUSED
    lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1 and lines[0].endswith(
        "must hold public keys of Ed25519 in PEM, and nothing else"
    )


def test_whoever_writes_a_manifest_says_that_its_signature_is_void(
    signed: Path, capsys: pytest.CaptureFixture[str]
):
    say_stale(signed)
    assert capsys.readouterr().err.startswith("outrider: manifest.sig: no longer holds")
    (signed / "manifest.sig").unlink()
    say_stale(signed)
    assert capsys.readouterr().err == ""


def test_plans_are_hashed_before_anybody_vouches_for_them(signed: Path):
    plan = signed / "plans" / "a.plan"
    plan.parent.mkdir()
    plan.write_bytes(b"a plan")
    write_manifest(signed, make_manifest(signed))
    assert run("sign", signed, "--key", signed.parent / "private.pem").exit_code == 0
    plan.write_bytes(b"a flan")
    for arguments in (
        ("verify", signed, "--trusted", signed.parent / "public.pem"),
        ("sign", signed, "--key", signed.parent / "private.pem"),
    ):
        result = run(*arguments)
        assert result.exit_code == EXIT_REFUSED
        assert result.stderr.startswith("outrider: plans/a.plan: content differs")
