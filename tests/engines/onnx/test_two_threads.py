"""Bits where a server's two threads share a product; the gate's own processes compute in one."""

from __future__ import annotations

import os
import subprocess
import sys

from scripts.tools.results import ROOT

# Products large enough to be shared, at the greatest capacity, in float32 and in blocks of int8.
TESTS = ("tests/export/graph/test_grouped_heads.py", "-k", "same_bits and 340 and not w8a8")


def test_two_threads_give_a_row_the_same_bits_in_every_shape() -> None:
    command = [sys.executable, "-m", "pytest", *TESTS]
    two = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=ROOT, env=two, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
