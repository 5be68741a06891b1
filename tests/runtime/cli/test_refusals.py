"""Whatever keeps a command from its work is said in one line, with a code that says whose turn it is."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from outrider.engines.bundle.bundle import load_bundle
from outrider.runtime.calibration import store
from outrider.runtime.cli.main import app
from outrider.runtime.cli.refusals import (
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_TERMINATED,
    EXIT_UNAVAILABLE,
    EXTRAS,
    end_on_sigterm,
    refusals,
)
from outrider.runtime.drafters.text.suffix_array import write_datastore
from outrider.runtime.offline import analysis, tuning
from outrider.runtime.offline.pages import analysis_page, tuning_page
from typer.testing import CliRunner

from tests.addons import needs_accelerators
from tests.runtime.markov import Harness

ROOT = Path(__file__).parents[3]


def refused(*arguments: str | Path, code: int = EXIT_REFUSED) -> str:
    """Run a command that must not work; return its one line."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.stderr.splitlines() if not line.startswith("serving on")]
    (line,) = [
        line for line in lines if line.startswith("outrider: ") and not line.endswith(" ...")
    ]
    return line


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("refused") / "bundle"))


@pytest.fixture
def manifest(bundle: Path):
    """Changes fields of the manifest, by path, for one test."""
    path = bundle / "manifest.json"
    kept = path.read_text()

    def change(**changes: object) -> None:
        data = json.loads(kept)
        for name, value in changes.items():
            *parents, last = name.split("__")
            section = data
            for parent in parents:
                section = section[parent]
            section[last] = value
        path.write_text(json.dumps(data))

    yield change
    path.write_text(kept)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--gamma", "9" * 10, "default_gamma: must be at most"),
        ("--gamma", "9" * 5000, "gamma: must be auto or a number of at most"),
        ("--gamma", "many", "gamma: must be auto or a number of at most"),
        ("--max-connections", str(1 << 31), "max_connections: must be at most"),
        ("--message-interval-s", "inf", "message_interval_s: must be at most"),
        ("--message-interval-s", "nan", "message_interval_s: must be at least"),
        ("--drain-timeout-s", "inf", "drain_timeout_s: must be at most"),
        ("--lb-delay-s", "1e300", "lb_delay_s: must be at most"),
        ("--max-queued", "9" * 23, "max_queued: must be at most"),
    ],
)
def test_an_absurd_option(option: str, value: str, said: str):
    assert said in refused("serve", "no-bundle", option, value)


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_is_none(port: str):
    result = CliRunner().invoke(app, ["serve", "no-bundle", "--metrics-port", port])
    assert result.exit_code == EXIT_REFUSED and "metrics-port" in result.stderr


def test_a_metrics_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused("serve", "no-bundle", "--metrics-port", str(taken.getsockname()[1]))
    assert said == "outrider: metrics_address: must be free to bind"


def test_a_port_that_is_taken_and_a_host_that_is_another_s():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("serve", "no-bundle", "--port", str(port))
    rule = "must be an address of this machine with a free port"
    assert said == f"outrider: host: {rule}; 127.0.0.1:{port} is not"
    said = refused("serve", "no-bundle", "--host", "203.0.113.1", "--port", "9", "--insecure")
    assert said == f"outrider: host: {rule}; 203.0.113.1:9 is not"


def test_a_name_of_the_model_that_no_message_can_have(tmp_path: Path):
    said = "outrider: model_name: must be UTF-8"
    assert refused("serve", "no-bundle", "--model-name", "a\udcff") == said
    assert refused("serve", tmp_path / "a\udcff", "--port", "0") == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_context": 10**30}, "'max_context' must be at most"),
        ({"max_context": 513}, "has 512 positions, but max_context is 513"),
        ({"max_batch": 2**40}, "'max_batch' must be at most"),
        ({"max_gamma": 10**6}, "'max_gamma' must be at most 511"),
        ({"eos_token_ids": [2**40]}, "'eos_token_ids' must be at most 511"),
        ({"bos_token_id": 512}, "'bos_token_id' must be at most 511"),
        ({"target__num_layers": 10**12}, "'target.num_layers' must be at most"),
        ({"draft__max_tree_nodes": 10**12}, "'draft.max_tree_nodes' must be at most"),
        ({"draft__max_tree_nodes": 1}, "field 'draft.max_tree_nodes' must be 0 or at least 2"),
        ({"files": {"\udcff\n": {"sha256": "", "size": 1}}}, "manifest.json: not JSON: "),
    ],
)
def test_an_absurd_manifest(bundle: Path, manifest, changes: dict[str, object], said: str):
    manifest(**changes)
    assert said in refused("serve", bundle, "--device", "cpu")


DAMAGES = {
    "missing": Path.unlink,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "other": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_file_of_a_bundle_is_refused_by_its_name(
    damage: str, tiny_bundle: Path, tmp_path: Path
):
    files = [one.relative_to(tiny_bundle) for one in tiny_bundle.rglob("*") if one.is_file()]
    assert len(files) > 5
    for file in files:
        root = Path(shutil.copytree(tiny_bundle, tmp_path / str(file).replace("/", "-")))
        DAMAGES[damage](root / file)
        assert str(file) in refused("serve", root, "--device", "cpu"), file


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_file_of_a_checkpoint_is_refused_and_nothing_is_left(
    damage: str, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        checkpoint = Path(shutil.copytree(tiny_checkpoints[1], tmp_path / name))
        DAMAGES[damage](checkpoint / name)
        refused("export", "--target", checkpoint, "--out", tmp_path / "out", "--max-context", "64")
        assert {one.name for one in tmp_path.iterdir()} == {name}, name
        shutil.rmtree(checkpoint)


def test_a_nested_manifest(bundle: Path, manifest):
    manifest()
    text = (bundle / "manifest.json").read_text()
    nested = text.replace("{", '{"certificate": ' + '{"a": ' * 100_000, 1)
    (bundle / "manifest.json").write_text(nested)
    assert "manifest.json: not JSON" in refused("serve", bundle)


def test_a_manifest_that_was_written_half_is_no_obstacle(bundle: Path):
    left = bundle / "manifest.json.new"
    left.write_text("{")
    assert load_bundle(bundle).root == bundle
    left.unlink()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "null",
        '{"target": 1}',
        '{"capacities": [], "host": {"rows": {}}, "target": null, "draft": null, "catch_up": null, "trees": null}',
    ],
)
def test_a_broken_cost_table_is_measured_again(text: str, tmp_path: Path):
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(ZeroDivisionError):  # it gets as far as measuring
        store.load_or_measure([tmp_path / "table.json"], lambda: 1 // 0)


def test_too_little_memory_is_said(capsys: pytest.CaptureFixture[str]):
    import numpy as np
    import typer

    with pytest.raises(typer.Exit) as ended, refusals():
        np.zeros(1 << 60, np.int8)
    assert ended.value.exit_code == EXIT_REFUSED
    assert capsys.readouterr().err.startswith("outrider: too little memory: Unable to allocate")


COMMANDS = {
    "onnxruntime": ["serve", "BUNDLE", "--gamma", "1", "--device", "cpu"],
    "transformers": ["export", "--target", "a", "--out", "b"],
    "torch": ["parity", "a", "--target", "b"],
    "cuda": ["build", "a"],
}


@pytest.mark.parametrize(
    "package",
    ["onnxruntime", "transformers", "torch", pytest.param("cuda", marks=needs_accelerators)],
)
def test_a_missing_package_names_its_extra(package: str, bundle: Path):
    """In a process that cannot import it, as where the extra was not installed."""
    code = f"import sys; sys.modules[{package!r}] = None\nfrom outrider.runtime.cli.main import app\napp()"
    command = [str(bundle) if word == "BUNDLE" else word for word in COMMANDS[package]]
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == EXIT_REFUSED, done.stderr
    (line,) = [
        line
        for line in done.stderr.splitlines()
        if line.startswith("outrider: ") and "compiling" not in line
    ]
    assert line == f"outrider: needs {package}: pip install 'outrider-server[{EXTRAS[package]}]'"


def test_the_exit_code_says_whose_turn_it_is():
    import grpc
    import outrider
    import typer

    codes = {
        outrider.RequestRefused: EXIT_REFUSED,
        outrider.Unavailable: EXIT_UNAVAILABLE,
        outrider.Overloaded: EXIT_UNAVAILABLE,
        outrider.DeadlineExceeded: EXIT_UNAVAILABLE,
        outrider.ServerFailed: EXIT_FAILED,
        outrider.CallCancelled: EXIT_FAILED,
    }
    for kind, code in codes.items():
        with pytest.raises(typer.Exit) as ended, refusals():
            raise kind(grpc.StatusCode.UNKNOWN, "said")
        assert ended.value.exit_code == code, kind


def test_no_server_is_unavailable():
    refused("info", "--address", "127.0.0.1:1", code=EXIT_UNAVAILABLE)


def test_parity_refuses_another_checkpoint(tiny_bundle: Path, tiny_checkpoints):
    command = [sys.executable, "-m", "outrider.runtime.cli", "parity", str(tiny_bundle)]
    command += ["--target", str(tiny_checkpoints[1])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == EXIT_REFUSED
    assert "target: num_layers of this checkpoint is 1" in done.stderr


def test_sigterm_removes_what_an_export_wrote_and_the_next_one_what_a_killed_one_left(
    tiny_checkpoints, tmp_path: Path
):
    """Exports are stopped when they have made their folder; the first by SIGKILL, the second by SIGTERM."""
    code = (
        "import sys; from outrider.export import pipeline\n"
        "pipeline._write = lambda *a: (print('writing', flush=True), sys.stdin.read())\n"
        "from outrider.runtime.cli.main import app; app()"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-c", code, "export", "--max-context", "64"]
    command += ["--target", str(tiny_checkpoints[1]), "--out", str(out)]

    def stop(number: signal.Signals) -> int:
        running = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        with running:
            assert running.stdout.readline() == b"writing\n"
            running.send_signal(number)
            return running.wait()

    assert stop(signal.SIGKILL) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.export-")
    assert stop(signal.SIGTERM) == EXIT_TERMINATED
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sigterm():
    """The handler that the process had is put back."""
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("command", "measured", "page", "draw"),
    [("analyze", analysis, analysis_page, "draw_figures"), ("tune", tuning, tuning_page, "_draw")],
)
def test_sigterm_removes_what_was_written_of_a_page(
    command, measured, page, draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sigterm
):
    monkeypatch.setattr(measured, command, lambda *_: SimpleNamespace(bundle="b", trials=()))
    monkeypatch.setattr(page, "asdict", vars)
    monkeypatch.setattr(page, draw, terminate)
    (out := tmp_path / "out").mkdir()
    (out / "index.html").write_text("an earlier page")
    result = CliRunner().invoke(app, [command, "b", "--prompts", "p", "--out", str(out)])
    assert result.exit_code == EXIT_TERMINATED, result.output
    assert [*tmp_path.iterdir()] == [out]
    assert [one.name for one in out.iterdir()] == ["index.html"]
    assert (out / "index.html").read_text() == "an earlier page"


def test_sigterm_is_nothing_that_a_drafter_did(monkeypatch: pytest.MonkeyPatch, sigterm):
    end_on_sigterm()
    harness = Harness("F3")
    drafter = harness.worker._parts.drafters["phrases"]
    monkeypatch.setattr(type(drafter), "propose", terminate)
    harness.submit("a", (1, 2, 1, 2), drafter="phrases", gamma=3)
    with pytest.raises(typer.Exit) as ended, refusals():
        harness.run()
    assert ended.value.exit_code == EXIT_TERMINATED


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_whoever_is_stopped_while_writing_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stopped(*_: object) -> None:
        raise error

    table = SimpleNamespace(is_settled=True, disagreement=0.0)
    monkeypatch.setattr(store, "table_to_json", lambda _: "{}")
    for name in ("replace", "rename"):
        monkeypatch.setattr(Path, name, stopped)
    with contextlib.suppress(KeyboardInterrupt):
        store.load_or_measure([tmp_path / "a.json"], lambda: table)
    with pytest.raises(error):
        write_datastore([(1, 2)], tmp_path / "store", vocab_size=9)
    assert [*tmp_path.iterdir()] == []
