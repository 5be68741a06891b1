"""Regenerate the committed stubs of ``proto/outrider/v1`` from their .proto files.

``python scripts/gen_proto.py`` writes them in place; ``--out DIR`` writes elsewhere, for the test
that compares.

Stubs refuse libraries older than the generator, whatever they use of them. The generator's versions are therefore
replaced by the oldest ones that the client's distribution allows: grpcio-tools 1.71.0 writes the same code, but for
annotations and names of bases. ``tests/runtime/cli/test_oldest_client.py`` runs the client on those versions.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent.parent / "proto"
# What the generator writes of its version -> the oldest versions that proto/pyproject.toml allows.
OLDEST = {
    r"Protobuf Python Version: [\d.]+": "Protobuf Python Version: 6.31.0",
    r"(?<=Domain.PUBLIC,\n)    \d+,\n    \d+,\n    \d+,\n": "    6,\n    31,\n    0,\n",
    r"GRPC_GENERATED_VERSION = '[\d.]+'": "GRPC_GENERATED_VERSION = '1.71.0'",
}


def generate(out: Path) -> None:
    """Write ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` under ``out``."""
    sources = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.glob("**/*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={PROTO_ROOT}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")
    for path in out.glob("outrider/**/*_pb2*.py"):
        text = path.read_text(encoding="utf-8")
        for pattern, oldest in OLDEST.items():
            text = re.sub(pattern, oldest, text)
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROTO_ROOT)
    generate(parser.parse_args().out)


if __name__ == "__main__":
    main()
