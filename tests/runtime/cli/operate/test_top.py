"""``outrider top``: what a frame says of two scrapes, one frame of a real server, and refusals in one line."""

from __future__ import annotations

import io
import math
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from outrider.runtime.cli.main import app
from outrider.runtime.cli.operate.frame import Window, frame, parse_scrape
from outrider.runtime.cli.refusals import EXIT_TERMINATED
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.observability.scrape_collector import ScrapeCollector
from rich.console import Console
from typer.testing import CliRunner

from tests.runtime.serving.security.credentials import key_security, write
from tests.runtime.serving.security.metrics_listener import listening
from tests.runtime.watched import Watched

ENTERED, LEFT = b"\x1b[?1049h", b"\x1b[?1049l"
"""What a terminal is told to show another screen, and the first one again."""


def text_of(counter: float, fast: int, slow: int) -> str:
    """Metrics of a server that has done so much."""
    return f"""
outrider_build_info{{model_name="m",version="1.2"}} 1
outrider_engine_state{{state="serving"}} 1
outrider_engine_state{{state="draining"}} 0
outrider_slots 8
outrider_num_requests_running 3
outrider_generation_tokens_total {counter}
outrider_requests_finished_total{{code="OK"}} {counter}
outrider_requests_finished_total{{code="CANCELLED"}} {counter}
outrider_spec_decode_num_drafts_total {counter}
outrider_spec_decode_num_accepted_tokens_total {2 * counter}
outrider_spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {counter * 3 / 4}
outrider_spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {counter}
outrider_control_speed_up NaN
outrider_control_alpha{{drafter="model"}} NaN
outrider_control_least_alpha{{drafter="model"}} 0.45
# TYPE outrider_time_to_first_token_seconds histogram
outrider_time_to_first_token_seconds_bucket{{le="0.1"}} {fast}
outrider_time_to_first_token_seconds_bucket{{le="0.3"}} {fast + slow}
outrider_time_to_first_token_seconds_bucket{{le="+Inf"}} {fast + slow}
"""


def window(before: str, now: str, seconds: float = 4.0) -> Window:
    return Window(parse_scrape(before, 10.0), parse_scrape(now, 10.0 + seconds))


def test_rates_are_of_the_time_between_and_sum_over_labels():
    seen = window(text_of(100.0, 0, 0), text_of(140.0, 0, 0))
    assert seen.rate("generation_tokens_total") == 10.0
    assert seen.rate("requests_finished_total") == 20.0
    assert seen.rate("requests_finished_total", code="OK") == 10.0
    accepted = "spec_decode_num_accepted_tokens_per_pos_total"
    assert seen.ratio(accepted, "spec_decode_num_drafts_total", position="0") == 0.75


def test_a_server_that_began_anew_counts_from_nothing():
    seen = window(text_of(100.0, 0, 0), text_of(40.0, 0, 0))
    assert seen.rate("generation_tokens_total") == 10.0
    assert math.isnan(seen.rate("nothing_total"))


def test_quantiles_are_those_of_new_observations():
    seen = window(text_of(0.0, 1000, 0), text_of(1.0, 1050, 50))
    assert seen.quantile("time_to_first_token_seconds", 0.5) == pytest.approx(0.1)
    assert seen.quantile("time_to_first_token_seconds", 0.75) == pytest.approx(0.2)
    assert math.isnan(window(text_of(0, 5, 5), text_of(0, 5, 5)).quantile("x", 0.5))


def lines_of(seen: Window) -> list[str]:
    """The lines that a frame prints, each with single spaces."""
    printed = io.StringIO()
    Console(width=120, file=printed).print(frame(seen))
    return [" ".join(line.split()) for line in printed.getvalue().splitlines()]


def test_a_frame_says_what_is_known_and_a_dash_for_the_rest():
    title, *lines = lines_of(window(text_of(0.0, 0, 0), text_of(40.0, 20, 0)))
    assert title == "outrider top m 1.2 serving"
    assert lines[0] == "requests running, of slots 3 of 8 speed over plain decoding -"
    assert lines[1] == "waiting - alpha, of first draft tokens 75%"
    assert lines[2] == "ended per s 20 tokens per round that drafted 3"
    assert (
        "first token, 50 and 95 of 100 50.0 ms / 95.0 ms prompt tokens found in the cache -"
        in lines
    )
    assert any(line.endswith("verdict model pays from alpha 0.45 on") for line in lines)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["top", "--once", "--interval-s", "0.1", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_one_frame_of_a_real_server(watched: Watched):
    code, out, err = run("--metrics-url", f"http://127.0.0.1:{watched.metrics_port}")
    assert (code, err) == (0, "")
    assert "serving" in out.splitlines()[0] and "of 4" in out


def test_sigterm_leaves_the_terminal_as_it_was(watched: Watched):
    ours, theirs = pty.openpty()
    command = (
        "top",
        "--interval-s",
        "0.1",
        "--metrics-url",
        f"http://127.0.0.1:{watched.metrics_port}",
    )
    environment = {**os.environ, "TERM": "xterm"}
    shown = subprocess.Popen(
        [sys.executable, "-m", "outrider.runtime.cli", *command],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
    )  # fmt: skip
    os.close(theirs)
    written = b""
    try:
        while written.count(b"outrider top") < 2:
            written += os.read(ours, 65536)
        shown.terminate()
        with suppress(OSError):  # nobody has the terminal any more
            while True:
                written += os.read(ours, 65536)
        assert shown.wait() == EXIT_TERMINATED
    finally:
        shown.kill()
        shown.wait()
        os.close(ours)
    assert written.count(ENTERED) == written.count(LEFT) == 1 and b"Traceback" not in written


def test_a_socket_and_a_key(tmp_path: Path):
    security, keys = key_security(tmp_path)
    url = f"unix:{tmp_path / 'metrics.sock'}"
    with listening(security, url, collector=ScrapeCollector(Metrics().registry, "m")):
        code, _, err = run("--metrics-url", url)
        assert (code, err) == (
            3,
            f"outrider: no metrics at {url}: a key with the scope metrics is needed: --api-key-file\n",
        )
        file = write(tmp_path / "key", keys["scraper"])
        code, out, err = run("--metrics-url", url, "--api-key-file", str(file))
        assert (code, err) == (0, "") and out.startswith("outrider top")


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("localhost:9000", "must be http://HOST:PORT"),
        ("http://user:secret@localhost:1", "must be http://HOST:PORT"),
        ("http://[::1", "must be http://HOST:PORT"),
        ("http://[secret]:1", "must be http://HOST:PORT"),
        ("http://localhost:x", "must be http://HOST:PORT"),
        ("http://example.org:1", "must be https for a key"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(tmp_path: Path, url: str, rule: str):
    code, _, err = run("--metrics-url", url, "--api-key-file", str(write(tmp_path / "key", "k")))
    assert code == 2 and err.startswith(f"outrider: metrics_url: {rule}") and err.count("\n") == 1
    assert "secret" not in err


@pytest.mark.parametrize("key", ["secret\nsecond", "secret second", "secr\xe4t", ""])
def test_a_file_that_is_no_key_is_refused_and_not_told(tmp_path: Path, key: str):
    file = write(tmp_path / "key", key)
    code, _, err = run("--metrics-url", "unix:/nowhere", "--api-key-file", str(file))
    assert (code, err) == (
        2,
        "outrider: api_key: must be printable ASCII letters without spaces\n",
    )


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Somebody who answers one connection with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"no such protocol\r\n\r\n", "the answer is not HTTP"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "the answer has status 404"),
        (b"HTTP/1.0 200 OK\r\n\r\nup 1\n", "these are no metrics of outrider serve"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>\n", ""),
    ],
)
def test_who_is_no_server_of_ours_is_named_in_one_line(answer: bytes, said: str):
    with answering(answer) as url:
        code, _, err = run("--metrics-url", url)
    assert code == 3 and err.startswith(f"outrider: no metrics at {url}: {said}")
    assert err.count("\n") == 1


def test_nobody_there_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    code, _, err = run("--metrics-url", url)
    assert code == 3 and "refused" in err and err.count("\n") == 1
