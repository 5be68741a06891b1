"""Names of the server's distribution, where it is not installed: the client alone is on the path."""

import os
import subprocess
import sys
from pathlib import Path

import outrider
import pytest
from outrider.absent import import_of_server

ROOT = Path(__file__).parents[2]
CLIENT_ALONE = """
import sys
from importlib.abc import MetaPathFinder

class NoServer(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] in (["outrider", "runtime"], ["outrider", "export"], ["outrider", "engines"]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import outrider
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in repr(one)]
assert "LLM" not in dir(outrider)
sys.meta_path.insert(0, NoServer())
from outrider import Client, SamplingParams, SyncClient
assert not {"numpy", "torch", "onnxruntime", "pytest"} & {*sys.modules}
try:
    from outrider import LLM
except ImportError as error:
    print(error)
from outrider.testing import assert_parity
try:
    assert_parity("bundle", "checkpoint")
except ImportError as error:
    print(error)
"""


def test_the_client_alone_says_which_distribution_is_missing():
    done = subprocess.run(
        [sys.executable, "-c", CLIENT_ALONE],
        env={**os.environ, "PYTHONPATH": str(ROOT / "proto")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "LLM needs the distribution 'outrider-server' (outrider.runtime is missing)" in first
    assert first.endswith("pip install 'outrider-server[cpu]'")
    assert second.endswith("pip install 'outrider-server[cpu,export]'")


def test_names_of_the_server_are_listed_where_it_is_installed():
    assert {"LLM", "Client", "build_request"} <= {*dir(outrider)}
    assert hasattr(outrider, "LLM")


def test_other_names_are_no_attributes():
    assert not hasattr(outrider, "LLMs")
    with pytest.raises(ImportError, match="no_such_module is missing"):
        import_of_server("no_such_module", "name", extra="cpu")
