"""What systemd is told, over real sockets: words of sd_notify, and a whole life of a server."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider.runtime.serving.supervision.notify import ALIVE, READY, SOCKET_VARIABLE, notify


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opened:
        opened.bind(str(tmp_path / "notify"))
        opened.settimeout(60)
        yield opened


def heard(manager: socket.socket) -> list[str]:
    return manager.recv(4096).decode().splitlines()


def test_words_and_a_status_are_one_message(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(SOCKET_VARIABLE, manager.getsockname())
    notify(READY, status="serving on port 1")
    notify(ALIVE)
    notify(status="measuring")
    assert heard(manager) == ["READY=1", "STATUS=serving on port 1"]
    assert heard(manager) == ["WATCHDOG=1"]
    assert heard(manager) == ["STATUS=measuring"]


def test_an_abstract_name_is_reached(monkeypatch: pytest.MonkeyPatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")
        name = manager.getsockname().decode()
        monkeypatch.setenv(SOCKET_VARIABLE, name.replace("\0", "@", 1))
        notify(READY)
        assert heard(manager) == ["READY=1"]


def test_nobody_who_asked_is_told_nothing(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    notify(READY)
    monkeypatch.setenv(SOCKET_VARIABLE, "vsock:1:2")
    notify(READY)
    assert not caplog.records


def test_a_manager_that_is_gone_or_does_not_read_keeps_nobody_waiting(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog
):
    monkeypatch.setenv(SOCKET_VARIABLE, manager.getsockname())
    manager.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    while not caplog.records:
        notify(ALIVE, status="a" * 1024)
    os.unlink(manager.getsockname())
    caplog.clear()
    for _ in range(3):
        notify(ALIVE)
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert said.getMessage().endswith("is not told how the server is: No such file or directory")


def test_a_server_tells_its_whole_life(tiny_bundle: Path, manager: socket.socket):
    arguments = ("serve", str(tiny_bundle), "--device", "cpu", "--gamma", "2", "--port", "0")
    server = subprocess.Popen(
        [sys.executable, "-m", "outrider.runtime.cli", *arguments, "--lb-delay-s", "0"],
        env={**os.environ, SOCKET_VARIABLE: manager.getsockname()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert heard(manager) == ["STATUS=opening the bundle"]
        words = heard(manager)
        while words[0].startswith("STATUS="):
            words = heard(manager)
        ready, status = words
        assert ready == "READY=1"
        assert status.startswith("STATUS=serving on port ")
        # Twice, so that the watch has gone round.
        assert [heard(manager), heard(manager)] == [["WATCHDOG=1"]] * 2
    finally:
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate()
    said = heard(manager)
    while said == ["WATCHDOG=1"]:
        said = heard(manager)
    assert said == ["STOPPING=1", "STATUS=draining"]
    assert server.returncode == 0, err
