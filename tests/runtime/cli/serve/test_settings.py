"""Settings from flags, environment, file and defaults: who wins, and what is refused by name."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from outrider.runtime.cli.main import app
from outrider.runtime.cli.serve import command, limits
from outrider.runtime.core.breaker import BreakerConfig
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig, setting_names
from outrider.runtime.serving.factory import ServeOptions
from typer.testing import CliRunner

from scripts.list_settings import PAGE, renewed


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CONFIG", raising=False)


def read(*arguments: str, **variables: str) -> tuple[Path, ServeOptions]:
    """Return what serve would be started with."""
    found: list[tuple[Path, ServeOptions]] = []
    probe = typer.Typer()

    @probe.command(context_settings=command.settings.CONTEXT)
    @command.with_settings
    def serve(**given: Any) -> None:
        found.append(command.what_to_serve(**given))

    result = CliRunner().invoke(probe, list(arguments), env=variables, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def options(*arguments: str, **variables: str) -> ServeOptions:
    return read("bundle", *arguments, **variables)[1]


def refused(*arguments: str, **variables: str) -> str:
    result = CliRunner().invoke(app, ["config", "bundle", *arguments], env=variables)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())


def write(folder: Path, text: str) -> tuple[str, str]:
    path = folder / "serve.toml"
    path.write_text(text, encoding="utf-8")
    return "--config", str(path)


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path):
    file = write(tmp_path, "max_running = 1\nmax_queued = 1\nmax_connections = 1")
    given = options(
        *file,
        "--max-running",
        "3",
        OUTRIDER_SERVE_MAX_RUNNING="2",
        OUTRIDER_SERVE_MAX_QUEUED="2",
    ).config
    assert (given.max_running, given.max_queued, given.max_connections) == (3, 2, 1)
    assert given.num_threads == ServerConfig().num_threads


def test_each_limit_is_a_setting_of_its_own(tmp_path: Path):
    file = write(tmp_path, "[limits]\nmax_n = 1\nmax_beams = 1\nmax_logprobs = 1\n")
    variables = {"OUTRIDER_SERVE_LIMIT": "max_beams=2 max_logprobs=2"}
    given = options(*file, "--limit", "max_logprobs=3", **variables).limits
    assert (given.max_n, given.max_beams, given.max_logprobs) == (1, 2, 3)


def test_everything_may_be_in_the_file(tmp_path: Path):
    file = write(
        tmp_path,
        """
        bundle = "pair"
        gamma = 3
        insecure = true
        open_health = false
        queue_timeout_s = inf
        audit_log = "audit.jsonl"
        [drafting]
        branching = [4, 2]
        phrase_draft = false
        [provider_options]
        enable_cuda_graph = 1
        """,
    )
    bundle, given = read(*file)
    assert bundle == Path("pair")
    assert (given.security.is_insecure, given.security.has_open_health) == (True, False)
    assert (given.config.default_gamma, given.config.queue_timeout_s) == (3, float("inf"))
    assert given.audit_log == Path("audit.jsonl")
    assert given.config.drafting.branching == (4, 2)
    assert not given.config.drafting.phrase_draft
    assert given.config.provider_options == (("enable_cuda_graph", "1"),)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path):
    _, path = write(tmp_path, "max_queued = 7")
    assert options(OUTRIDER_CONFIG=path).config.max_queued == 7


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_runing = 3", "has the unknown name 'max_runing'; did you mean 'max_running'?"),
        ("[limits]\nmax_tokns = 3", "limit: has the unknown name 'max_tokns'; did you mean 'max_tokens'?"),
        ("[drafting]\nwindows = 3", "drafting: has the unknown name 'windows'; did you mean 'window'?"),
        ('api_key = "s3cret"', "has the unknown name 'api_key'"),
        ('config = "other.toml"', "has the unknown name 'config'"),
        ('limit = ["max_n=1"]', "has the unknown name 'limit'; did you mean 'limits'?"),
        ('max_running = "many"', "'--max-running'"),
        ("max_running = 2.5", "'--max-running'"),
        ("max_running = true", "'--max-running'"),
        ('insecure = "perhaps"', "'--insecure'"),
        ("metrics_port = 70000", "'--metrics-port'"),
        ("model_name = ['a', 'b']", "model_name: must be"),
        ("max_running = 1979-05-27", "max_running: must be"),
        ("max_running = 0", "max_running: must be at least 1"),
        ("limits = 3", "limits: must be a table"),
        ('[limits]\nmax_tokens = "s3cret"', "max_tokens: must be a whole number"),
        ("[limits]\nmax_tokens = 0", "max_tokens: must be in [1, 2147483647]"),
        ("[limits]\nmax_request_s = 0", "max_request_s: must be more than 0 seconds"),
        ("[limits]\nbreaker_max_failures = 0", "breaker_max_failures: must be at least 1"),
        ("[limits.max_tokens]\na = 3", "limits.max_tokens: must be"),
        ("max_running = s3cret", "must be TOML: Invalid value (at line 1, column 15)"),
        ("a = " + "[" * 5000, "must be TOML"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused_by_name(tmp_path: Path, text: str, complaint: str):
    line = refused(*write(tmp_path, text))
    assert complaint in line
    assert "s3cret" not in line


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "serve.toml").write_bytes(b"a = '\xff'")
    assert "must be TOML: it cannot be read" in refused("--config", str(tmp_path / "serve.toml"))


def test_an_unknown_variable_is_refused_by_name():
    line = refused(OUTRIDER_SERVE_CONFIG="serve.toml")
    assert "'OUTRIDER_SERVE_CONFIG'; did you mean 'OUTRIDER_CONFIG'?" in line
    line = refused(OUTRIDER_SERVE_MAX_RUNING="3")
    assert "'OUTRIDER_SERVE_MAX_RUNING'; did you mean 'OUTRIDER_SERVE_MAX_RUNNING'?" in line
    assert "OUTRIDER_SERVE_SHOW" in refused(OUTRIDER_SERVE_SHOW="1")


def test_a_limit_is_given_once_in_one_place():
    assert "max_n: must be given once" in refused("--limit", "max_n=1", "--limit", "max_n=1")


def test_no_bundle_is_refused():
    result = CliRunner().invoke(app, ["serve"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "bundle: must be given" in result.stderr


# Fields of ServerConfig that have an option of their own, what they are set to, and what that makes of them.
OWN: dict[str, tuple[list[str], object]] = {
    "max_running": (["--max-running", "3"], 3),
    "max_queued": (["--max-queued", "3"], 3),
    "max_connections": (["--max-connections", "3"], 3),
    "queue_timeout_s": (["--queue-timeout-s", "3"], 3.0),
    "default_gamma": (["--gamma", "3"], 3),
    "block_verification": (["--block-verification"], True),
    "default_drafter": (["--drafter", "none"], "none"),
    "auto_drafters": (["--auto-drafters", "lookup,model"], ("lookup", "model")),
    "drain_timeout_s": (["--drain-timeout-s", "3"], 3.0),
    "hang_s": (["--hang-s", "3"], 3.0),
    "lb_delay_s": (["--lb-delay-s", "3"], 3.0),
    "message_interval_s": (["--message-interval-s", "3"], 3.0),
    "num_threads": (["--threads", "3"], 3),
    "sampler": (["--sampler", "host"], "host"),
    "prefix_cache_bytes": (["--prefix-cache-bytes", "3"], 3),
    "prefix_cache_scope": (["--prefix-cache-scope", "server"], "server"),
    "provider_options": (["--provider-option", "a=b"], (("a", "b"),)),
}


@pytest.mark.parametrize("name", sorted(OWN))
def test_every_field_with_an_option_of_its_own_is_set_by_it(name: str):
    arguments, wanted = OWN[name]
    assert getattr(options(*arguments).config, name) == wanted


def test_every_other_limit_is_set_by_its_name():
    values = limits.limit_values(ServerConfig(), RequestLimits())
    changed = {name: value * 2 for name, value in values.items()}
    given = options(
        *(part for name, value in changed.items() for part in ("--limit", f"{name}={value}"))
    )
    assert limits.limit_values(given.config, given.limits) == changed
    assert {one.name for one in fields(ServerConfig)} == {
        *OWN,
        *limits.OF_SERVER,
        "breaker",
        "drafting",
    }
    assert {one.name for one in fields(RequestLimits)} <= set(values)
    assert {f"{limits.BREAKER}{one.name}" for one in fields(BreakerConfig)} <= set(values)


def test_every_setting_of_the_drafters_is_set_by_its_name():
    changed = asdict(DraftingConfig()) | {"window": 5, "min_prob": 0.5, "draft_passes": 2}
    pairs = {name: value for name, value in changed.items() if name in setting_names()}
    texts = [f"{name}={limits_text(value)}" for name, value in pairs.items()]
    given = options(*(part for text in texts for part in ("--drafting", text)))
    assert asdict(given.config.drafting) == changed
    assert set(setting_names()) == {one.name for one in fields(DraftingConfig)} - {
        "datastore",
        "history_scope",
    }


def limits_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


def test_the_page_lists_every_setting():
    page = PAGE.read_text(encoding="utf-8")
    assert page == renewed(page), "run python -m scripts.list_settings"
    for name in limits.limit_values(ServerConfig(), RequestLimits()):
        assert page.count(f"| `{name}` |") == 1
