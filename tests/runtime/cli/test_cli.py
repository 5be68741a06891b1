"""The command, end to end: serve a real bundle in a process of its own, stream, stop; verify it."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from outrider import Client
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.cli.main import app
from outrider.runtime.cli.refusals import EXIT_REFUSED
from outrider.runtime.core.params import sample_seed
from outrider.runtime.drafters.model.model import ModelDrafter
from outrider.runtime.drafters.text.suffix_array import Datastore
from outrider.runtime.loop.drafting import NO_DRAFT
from outrider.runtime.verify.chi_square import chi_square_tail, goodness_of_fit, homogeneity
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]


async def outrider(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "outrider.runtime.cli",
        *arguments,
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def completed(port: int, prompt: str) -> dict[str, Any]:
    """Return the answer to a completion over HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(asked))
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
    return answer


async def test_serve_generate_and_sigterm(tiny_bundle: Path, tmp_path: Path):
    port_file = tmp_path / "port"
    options = ("--port", "0", "--port-file", str(port_file), "--lb-delay-s", "0")
    over_http = ("--http-port", "0", "--http-port-file", str(tmp_path / "http"))
    server = await outrider("serve", str(tiny_bundle), *options, *over_http, "--refresh-costs")
    try:
        line = (await asyncio.wait_for(server.stdout.readline(), 60)).decode()
        address = f"127.0.0.1:{port_file.read_text().strip()}"
        assert address.endswith(line.split()[-1])
        line = (await asyncio.wait_for(server.stdout.readline(), 60)).decode()
        http_port = (tmp_path / "http").read_text().strip()
        assert line == f"serving HTTP on port {http_port}\n"
        answer = await asyncio.to_thread(completed, int(http_port), "the quick")
        assert answer["usage"]["completion_tokens"] == 4
        async with Client(address) as client:
            await client.wait_ready(timeout_s=10)
            responses = [r async for r in client.generate("the quick", max_tokens=16)]
            assert sum(len(r.tokens) for r in responses) == responses[-1].finish.usage.output_tokens
        generate = await outrider(
            *("generate", "--address", address, "--prompt", "the quick", "--max-tokens", "12"),
            *("--temperature", "0", "--trace"),
        )
        out, err = await asyncio.wait_for(generate.communicate(), 60)
        assert generate.returncode == 0, err.decode()
        lines = [text for text in out.decode().splitlines() if text.strip()[:1].isdigit()]
        assert lines and all("='" in text or '="' in text for text in lines[:-1])
        assert "tokens_per_step" in out.decode()
        search = await outrider(
            *("generate", "--address", address, "--prompt", "the quick", "--max-tokens", "5"),
            *("--num-beams", "3", "--num-results", "2", "--length-penalty", "0.5"),
            *("--exhaustive-search", "--gamma", "2"),
        )
        out, err = await asyncio.wait_for(search.communicate(), 60)
        assert search.returncode == 0, err.decode()
        headings = [line for line in out.decode().splitlines() if line.startswith("#")]
        assert [line.split()[0] for line in headings] == ["#1", "#2"]
        scores = [float(line.split()[2]) for line in headings]
        assert scores == sorted(scores, reverse=True)
        several = await outrider(
            *("generate", "--address", address, "--prompt", "the quick", "--max-tokens", "5"),
            *("--num-results", "3", "--seed", "4"),
        )
        out, err = await asyncio.wait_for(several.communicate(), 60)
        assert several.returncode == 0, err.decode()
        headings = [line.split() for line in out.decode().splitlines() if line.startswith("#")]
        assert {line[0]: line[2] for line in headings} == {
            f"#{index + 1}": str(sample_seed(4, index)) for index in range(3)
        }
        refused = await outrider(
            "generate", "--address", address, "--prompt", "x", "--temperature", "9"
        )
        _, err = await asyncio.wait_for(refused.communicate(), 60)
        assert refused.returncode == 2 and b"sampling.temperature" in err
        assert b"Traceback" not in err
    finally:
        server.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(server.communicate(), 60)
    assert server.returncode == 0, err.decode()
    assert re.search(
        r"outrider: measuring what steps cost on this machine: \d+\.\d s", err.decode()
    )


def test_a_datastore_is_built_once_and_read_by_the_drafters(tiny_bundle: Path, tmp_path: Path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("def main():\n    return 1\n")
    (tmp_path / "b.py").write_text("class A: ...")
    store = tmp_path / "store"
    command = [
        "datastore",
        "build",
        str(tiny_bundle),
        str(tmp_path / "texts"),
        str(tmp_path / "b.py"),
    ]
    result = CliRunner().invoke(app, [*command, "--out", str(store)])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("2 texts, ")
    vocab_size = load_bundle(tiny_bundle).manifest.target.vocab_size
    assert (Datastore.open(store, vocab_size=vocab_size).tokens == vocab_size).sum() == 2
    again = CliRunner().invoke(app, [*command, "--out", str(store)])
    assert again.exit_code == 2
    assert "exists already" in again.output


def test_a_file_that_cannot_be_read_is_refused_in_a_line(tiny_bundle: Path, tmp_path: Path):
    missing = str(tmp_path / "missing.txt")
    for command in (
        ("generate", "--prompt", "x", "--reference", missing),
        ("datastore", "build", str(tiny_bundle), missing, "--out", str(tmp_path / "store")),
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, result.output
        assert result.output.startswith("outrider: ") and missing in result.output


def test_verify_sampler_passes_on_a_correct_bundle(tiny_bundle: Path):
    result = CliRunner().invoke(app, ["verify-sampler", str(tiny_bundle), "--samples", "200"])
    assert result.exit_code == 0, result.output
    assert "false-alarm rate" in result.output and "pair, tree, token 3" in result.output
    assert "pair, cascade, token 4" in result.output and "pair, model, bias" in result.output
    assert "\nnot covered: lenient (not exact by its definition), constraints," in result.output


def test_verify_sampler_fails_where_nothing_is_drafted(tiny_bundle: Path, monkeypatch):
    """Two equal laws without a draft prove nothing of speculation."""
    monkeypatch.setattr(ModelDrafter, "propose", lambda self, rows, gammas: [NO_DRAFT] * len(rows))
    result = CliRunner().invoke(app, ["verify-sampler", str(tiny_bundle), "--samples", "200"])
    assert result.exit_code == 1
    failed = [line for line in result.output.splitlines() if line.startswith("FAIL ")]
    assert failed and all("0 tokens drafted" in line for line in failed)


def test_verify_sampler_fails_a_sampler_that_is_slightly_too_cold(tiny_bundle, monkeypatch):
    judge = CpuSampler.judge
    monkeypatch.setattr(
        CpuSampler, "judge", lambda self, logits, rows: judge(self, 3.0 * logits, rows)
    )
    result = CliRunner().invoke(app, ["verify-sampler", str(tiny_bundle), "--samples", "300"])
    assert result.exit_code == 1 and "FAIL" in result.output


async def test_parity_of_a_bundle_is_a_verdict_or_json(tiny_bundle, tiny_checkpoints):
    target, draft = map(str, tiny_checkpoints)
    # Processes of their own: engines set a process-wide thread pool that other sessions refuse.
    plain = await outrider("parity", str(tiny_bundle), "--target", target, "--draft", draft)
    as_json = await outrider("parity", str(tiny_bundle), "--target", target, "--json")
    for command in (plain, as_json):
        out, err = await asyncio.wait_for(command.communicate(), 120)
        assert command.returncode == 0, err.decode()
        if command is plain:
            assert out.startswith(b"parity holds; target: logits within")
        else:
            assert set(json.loads(out)) == {"target"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["cudnn"], "provider_options: must be KEY=VALUE"),
        (["a=1", "a=2"], "provider_options: must name every key once"),
        (["enable_cuda_graph=1"], "provider option enable_cuda_graph: device cpu has no such"),
    ],
)
def test_a_provider_option_that_nothing_reads_is_refused(tiny_bundle, options, reason):
    flags = [part for option in options for part in ("--provider-option", option)]
    arguments = ["serve", str(tiny_bundle), "--device", "cpu", "--gamma", "1", "--port", "0"]
    result = CliRunner().invoke(app, [*arguments, *flags])
    assert result.exit_code == EXIT_REFUSED
    assert reason in result.output


def test_serving_imports_neither_torch_nor_what_draws_pictures():
    code = (
        "import sys, outrider.runtime.serving.process, outrider.runtime.cli.main\n"
        "heavy = ('torch', 'transformers', 'outrider.export', 'matplotlib', 'outrider.runtime.offline')\n"
        "sys.exit(any(name in sys.modules for name in heavy))"
    )

    async def run() -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, cwd=ROOT, env={"PATH": ""}
        )
        return await asyncio.wait_for(process.wait(), 60)

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"),
    [(3.841458820694124, 1, 0.05), (5.991464547107979, 2, 0.05), (18.307038, 10, 0.05)],
)
def test_chi_square_tail_against_tables(statistic, degrees, tail):
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=1e-6)


def test_the_tests_tell_wrong_laws_from_right_ones():
    import numpy as np

    probs = np.array([0.5, 0.3, 0.2, 0.0])
    assert goodness_of_fit({0: 500, 1: 300, 2: 200}, probs) == 1.0
    assert goodness_of_fit({0: 400, 1: 400, 2: 200}, probs) < 1e-9
    assert goodness_of_fit({0: 500, 1: 300, 2: 199, 3: 1}, probs) == 0.0
    assert homogeneity({0: 500, 1: 500}, {0: 500, 1: 500}) == 1.0
    assert homogeneity({0: 600, 1: 400}, {0: 400, 1: 600}) < 1e-9


def test_verify_sampler_takes_prompts_of_ones_own(tiny_bundle: Path, tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n")
    options = ["verify-sampler", str(tiny_bundle), "--prompts", str(file)]
    refused = CliRunner().invoke(app, options)
    assert refused.exit_code == 2 and "must have at least one prompt" in refused.output
    longer = ["verify-sampler", str(tiny_bundle), "--prompt", "the quick", "--prompt", "x " * 300]
    refused = CliRunner().invoke(app, longer)
    assert refused.exit_code == 2 and "prompt 2: must have 1..252 tokens" in refused.output
