"""Checkpoints by name: a server that speaks the Hub's few routes, over files of a tiny model."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.hub import Located, locate, wanted_files
from outrider.runtime.cli.main import app
from typer.testing import CliRunner

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Routes of a Hub with one model, org/tiny, whose branch main and tag v1 are one commit."""

    folder: Path

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None: ...

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny"):
            self._say_model(path)
        elif path.startswith("/api/models/org/gated"):
            self._refuse(403, "GatedRepo")
        elif path.startswith("/api/models/org/down"):
            self._refuse(503, "")
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self._send_file(path.rpartition("/")[2], with_body=with_body)
        else:
            self._refuse(401, "RepoNotFound")

    def _say_model(self, path: str) -> None:
        revision = path.partition("/revision/")[2]
        if revision not in ("", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
            return
        files = [one.name for one in self.folder.iterdir()]
        siblings = [{"rfilename": name} for name in (*files, "pytorch_model.bin", "modeling_x.py")]
        if "/tree/" in path:
            found = [self._entry(name) for name in files]
            self._send(json.dumps(found).encode(), {"content-type": "application/json"})
            return
        model = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings}
        self._send(json.dumps(model).encode(), {"content-type": "application/json"})

    def _entry(self, name: str) -> dict[str, object]:
        data = (self.folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}

    def _send_file(self, name: str, *, with_body: bool) -> None:
        data = (self.folder / name).read_bytes()
        headers = {"etag": f'"{sha1(data).hexdigest()}"', "x-repo-commit": COMMIT}
        self._send(data, headers, with_body=with_body)

    def _send(self, data: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(200)
        for key, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def _refuse(self, code: int, reason: str) -> None:
        self.send_response(code)
        self.send_header("x-error-code", reason)
        self.send_header("content-length", "0")
        self.end_headers()


@pytest.fixture
def ask_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Sets where huggingface_hub asks, which it reads from the environment once, when it is imported."""

    def ask(endpoint: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    return ask


@pytest.fixture
def hub(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path, ask_at: Callable[[str], None]
) -> Iterator[None]:
    """The server, asked instead of the Hub."""
    folder = shutil.copytree(tiny_checkpoints[1], tmp_path / "served")
    handler = type("Served", (Hub,), {"folder": Path(folder)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    ask_at(f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("hub")
def test_a_model_is_exported_by_its_name_and_its_commit_is_pinned(tmp_path: Path):
    out = tmp_path / "bundle"
    sizes = ("--max-context", "64", "--max-tree-nodes", "0")
    done = CliRunner().invoke(app, ["export", "--target", "org/tiny@v1", "--out", str(out), *sizes])
    assert done.exit_code == 0, done.output
    assert load_bundle(out).manifest.sources == {"target": f"org/tiny@{COMMIT}"}
    assert f"target: org/tiny@{COMMIT}" in done.output
    *_, told, parity, command = done.output.splitlines()
    assert told.endswith("weights float32, context 64, 64 slots")
    assert parity.startswith("parity holds; target: logits within ")
    assert command == f"next: outrider serve {out}"
    fetched = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= fetched
    assert not {"pytorch_model.bin", "modeling_x.py"} & fetched
    again = CliRunner().invoke(app, ["parity", str(out), "--target", "org/tiny"])
    assert again.exit_code == 0, again.output
    assert "parity holds" in again.output


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/absent", "neither a folder nor a model of the Hub"),
        ("org/gated", "asks for permission"),
        ("org/tiny@v2", "org/tiny: has no revision v2"),
        ("org/down", "the Hub refuses: Server error '503"),
    ],
)
def test_what_cannot_be_fetched_is_told_in_a_line(name: str, words: str):
    with pytest.raises(BundleError, match=words) as refused:
        locate(Path(name))
    assert "\n" not in str(refused.value)


def test_without_a_network_a_name_is_refused_in_a_line(ask_at: Callable[[str], None]):
    ask_at("http://127.0.0.1:9")
    with pytest.raises(BundleError, match="org/tiny: no such folder, and the Hub does not answer"):
        locate(Path("org/tiny"))


def test_a_folder_is_never_looked_up(tmp_path: Path):
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    assert locate(folder) == Located(folder)
    assert locate(Path("nowhere")) == Located(Path("nowhere"))


def test_weights_are_fetched_once_and_nothing_but_what_is_read():
    files = [
        "config.json",
        "tokenizer.model",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "model.fp16.safetensors",
        "onnx/config.json",
        "additional_chat_templates/tool.jinja",
        "pytorch_model.bin",
        "modeling_own.py",
    ]
    assert wanted_files(files) == [
        "config.json",
        "tokenizer.model",
        "model.safetensors.index.json",
        "additional_chat_templates/tool.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert wanted_files(["gptq_model-4bit.safetensors", "consolidated.safetensors"]) == [
        "gptq_model-4bit.safetensors"
    ]
