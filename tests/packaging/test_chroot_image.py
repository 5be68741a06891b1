"""The image's steps, run one by one in a chroot of Debian, and the server that they leave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest
from outrider import SyncClient

from scripts.tools.chroot_image import DOCKERFILE, Builder, Image, instructions, make_base

PORTS = {"OUTRIDER_SERVE_PORT": "50951", "OUTRIDER_SERVE_HTTP_PORT": "50952"}


def test_instructions_are_read_as_the_builder_does() -> None:
    text = 'ARG A\n# ARG B\nFROM a AS b\nRUN one \\\n# left out\n && two\nCMD ["x"]\n'
    assert [*instructions(text)] == [
        ("ARG", "A"),
        ("FROM", "a AS b"),
        ("RUN", "one   && two"),
        ("CMD", '["x"]'),
    ]
    names = [name for name, _ in instructions(DOCKERFILE.read_text("utf-8"))]
    assert names.count("FROM") == 2 and names[-2:] == ["ENTRYPOINT", "CMD"]


def test_a_command_runs_with_the_images_environment_user_and_folder(tmp_path: Path) -> None:
    image = Image(tmp_path, {"PATH": "/opt/bin:$PATH", "A": "a b"}, folder="/src", user="7:8")
    line = " ".join(image.argv(["outrider", "serve"]))
    assert "chroot --userspec=7:8" in line and "cd /src" in line
    assert "A=a b" in line and "PATH=/opt/bin:/usr/local/bin" in line


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """What the Dockerfile's steps leave."""
    if os.geteuid() or shutil.which("debootstrap") is None:
        pytest.skip("a chroot of Debian needs root and debootstrap")
    given = os.environ.get("OUTRIDER_CHROOT")
    folder = Path(given or tempfile.mkdtemp(prefix="outrider-image-"))
    make_base(folder, "bookworm", os.environ.get("OUTRIDER_MIRROR", "http://deb.debian.org/debian"))
    try:
        yield Builder(folder).build(DOCKERFILE.read_text("utf-8"))
    finally:
        if given is None:
            shutil.rmtree(folder)


@pytest.mark.long
def test_the_image_serves_grpc_http_and_the_page(image: Image, tiny_bundle: Path) -> None:
    shutil.copytree(tiny_bundle, image.root / "models" / "bundle", dirs_exist_ok=True)
    settings = {
        **PORTS,
        "OUTRIDER_SERVE_BUNDLE": "/models/bundle",
        "OUTRIDER_SERVE_INSECURE": "1",
        "OUTRIDER_SERVE_LB_DELAY_S": "0",
    }
    server = subprocess.Popen(image.argv([*image.entrypoint, *image.command], settings))
    try:
        with SyncClient(f"localhost:{PORTS['OUTRIDER_SERVE_PORT']}") as client:
            client.wait_ready(timeout_s=300)
            output = client.complete("def", max_tokens=4, temperature=0.0)
        assert len(output.outputs[0].token_ids) == 4
        url = f"http://localhost:{PORTS['OUTRIDER_SERVE_HTTP_PORT']}"
        body = json.dumps({"prompt": "def", "max_tokens": 4, "temperature": 0}).encode()
        asked = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urlopen(asked, timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
        with urlopen(f"{url}/", timeout=60) as answer:
            page = answer.read()
        assert text == output.text and b"<html" in page
        health = subprocess.run(image.argv(["outrider", "health"]), check=False)
        assert health.returncode == 0
        (owner,) = {os.stat(f"/proc/{pid}").st_uid for pid in _servers(server.pid)}
        assert owner == 10001
    finally:
        for pid in _servers(server.pid):
            os.kill(pid, 15)
        code = server.wait(timeout=60)
    assert code == 0


def _servers(first: int) -> list[int]:
    """Processes of the image's server."""
    below = psutil.Process(first).children(recursive=True)
    return [one.pid for one in below if any("bin/outrider" in part for part in one.cmdline())]
