"""``outrider config --show``: merged settings with their sources, and nothing that may be a secret."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from outrider.runtime.cli.main import app
from outrider.runtime.cli.operate.config import HIDDEN, SECRET, Row
from outrider.runtime.core.settings import options_of
from outrider.runtime.serving.settings import ServeOptions
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CONFIG", raising=False)


def config(*arguments: str | Path, **variables: str) -> str:
    result = CliRunner().invoke(app, ["config", *map(str, arguments)], env=variables)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text(
        'max_queued = 5\nkeys = "/etc/keys"\n[limits]\nmax_n = 2\nmax_beams = 2\n'
        '[provider_options]\napi_token = "s3cret"\ndevice_id = 1\nurl = "https://me:s3cret@host/"\n',
        encoding="utf-8",
    )
    return path


def shown(*arguments: str | Path, **variables: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config("--json", *arguments, **variables))
    return found


def test_each_setting_has_its_source(file: Path):
    found = shown(
        "--config", file, "--max-running", "3", "--limit", "max_n=4", OUTRIDER_SERVE_THREADS="5"
    )
    assert found["max_running"] == {"value": 3, "source": "command line"}
    assert found["threads"] == {"value": 5, "source": "environment"}
    assert found["max_queued"] == {"value": 5, "source": "file"}
    assert found["hang_s"] == {"value": 10.0, "source": "default"}
    assert found["limits"]["max_n"] == {"value": 4, "source": "command line"}
    assert found["limits"]["max_beams"] == {"value": 2, "source": "file"}
    assert found["limits"]["max_tokens"] == {"value": 4096, "source": "default"}
    assert found["drafting"]["window"] == {"value": 4, "source": "default"}
    assert found["provider_options"]["device_id"] == {"value": "1", "source": "file"}


def test_secrets_are_hidden_and_paths_of_secrets_are_not(file: Path):
    for text in (config("--show", "--config", file), config("--json", "--config", file)):
        assert "s3cret" not in text
        assert "/etc/keys" in text
        assert "api_token" in text
    assert "s3cret" not in config("--show", OUTRIDER_SERVE_PROVIDER_OPTION="my_PassWord=s3cret")
    several = Row(table="", name="api_keys", value=["s3cret"], source="file")
    assert several.shown == HIDDEN


def test_what_is_shown_is_a_file_to_start_with(tmp_path: Path):
    first = (
        "--limit",
        "max_request_s=inf",
        "--drafting",
        "branching=4,2",
        "--model-name",
        'a"\\\x7f\né',
    )
    text = config("--show", "pair", *first)
    path = tmp_path / "shown.toml"
    path.write_text(text, encoding="utf-8")
    assert tomllib.loads(text)["limits"]["max_request_s"] == float("inf")
    before, after = shown("pair", *first), shown("--config", path)
    assert values(after) == values(before)
    assert before["limits"]["max_request_s"]["value"] == "inf"


def values(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: one["value"] if "value" in one else values(one) for name, one in tree.items()}


def test_settings_are_checked_without_being_shown(file: Path):
    assert config("--config", file) == ""
    result = CliRunner().invoke(app, ["config", "--max-running", "0"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "outrider: max_running: must be at least 1\n"


def test_no_option_takes_a_secret_itself():
    smelling = {name: one.kind for name, one in options_of(ServeOptions) if SECRET.search(name)}
    assert {"keys", "jwt_keys", "tls_key"} <= set(smelling)
    assert all(kind == Path | None for kind in smelling.values())
