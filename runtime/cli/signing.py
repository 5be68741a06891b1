"""``outrider sign``, ``outrider verify`` and ``outrider key new-signer``: who vouches for a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.cli.refusals import refusals


def new_signer(
    private: Annotated[Path, typer.Argument(help="File to make, of the private key.")],
    public: Annotated[Path, typer.Argument(help="File to make, of the public key.")],
) -> None:
    """Make the key pair of a signer of bundles; the private key is without a passphrase."""
    from outrider.engines.bundle.signatures import fingerprint_of, make_signer

    with refusals():
        signer = make_signer(private, public)
    typer.echo(f"signer {fingerprint_of(signer)}: {public}")


def sign(
    bundle: Annotated[Path, typer.Argument(help="Bundle to vouch for, as it is now.")],
    key: Annotated[Path, typer.Option(help="Private key of Ed25519, PEM.")],
) -> None:
    """Sign a bundle, after checking all of its files against its manifest."""
    from outrider.engines.bundle.bundle import load_bundle
    from outrider.engines.bundle.signatures import fingerprint_of, sign_manifest

    with refusals():
        load_bundle(bundle).check_plans()
        signer = sign_manifest(bundle, key)
    typer.echo(f"signed by {fingerprint_of(signer)}")


def verify(
    bundle: Annotated[Path, typer.Argument(help="Bundle to check.")],
    trusted: Annotated[Path, typer.Option(help="Public keys of trusted signers, PEM.")],
) -> None:
    """Check that a trusted signer vouches for a bundle and that every file is as signed."""
    from outrider.engines.bundle.bundle import load_bundle
    from outrider.engines.bundle.signatures import read_signers

    with refusals():
        loaded = load_bundle(bundle, read_signers(trusted))
        loaded.check_plans()
    typer.echo(f"signed by {loaded.signer}: {len(loaded.manifest.files)} files as declared")


def say_stale(bundle: Path) -> None:
    """Say on standard error where writing a manifest ended a bundle's signature."""
    from outrider.engines.bundle.signatures import stale_line

    if line := stale_line(bundle):
        typer.echo(f"outrider: {line}", err=True)
