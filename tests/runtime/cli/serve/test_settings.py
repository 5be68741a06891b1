"""Settings from flags, environment, file and defaults: who wins, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from outrider.runtime.cli.main import app
from outrider.runtime.cli.serve.parameters import serve_options, with_settings
from outrider.runtime.cli.serve.settings import CONTEXT
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig, setting_names
from outrider.runtime.core.settings import Setting, known_of, named_of, options_of
from outrider.runtime.serving.settings import ServeOptions
from typer.testing import CliRunner

from scripts.list_settings import PAGE, renewed


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CONFIG", raising=False)


def read(*arguments: str, **variables: str) -> tuple[Path, ServeOptions]:
    """Return what serve would be started with."""
    found: list[tuple[Path, ServeOptions]] = []
    probe = typer.Typer()

    @probe.command(context_settings=CONTEXT)
    @with_settings
    def serve(**given: Any) -> None:
        found.append(serve_options(given))

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


def limits(of: ServeOptions) -> dict[str, Any]:
    return {one.name: one.value for one in named_of(of, "limits")}


# What is given, and the fields that differ by it from a server's that is given nothing.
OWN: list[tuple[str, dict[str, object]]] = [
    ("--max-running 3", {"max_running": 3}),
    ("--max-queued 3", {"max_queued": 3}),
    ("--max-connections 3", {"max_connections": 3}),
    ("--queue-timeout-s 3", {"queue_timeout_s": 3.0}),
    ("--gamma 3", {"default_gamma": 3, "leaves_gamma": False}),
    ("--gamma auto", {"leaves_gamma": False}),
    ("--gamma ", {"leaves_gamma": False}),
    ("--no-block-verification", {"block_verification": False}),
    ("--drafter none", {"default_drafter": "none", "leaves_drafter": False}),
    ("--auto-drafters lookup,model", {"auto_drafters": ("lookup", "model")}),
    ("--drain-timeout-s 3", {"drain_timeout_s": 3.0}),
    ("--hang-s 3", {"hang_s": 3.0}),
    ("--lb-delay-s 3", {"lb_delay_s": 3.0}),
    ("--message-interval-s 3", {"message_interval_s": 3.0}),
    ("--threads 3", {"num_threads": 3}),
    ("--sampler host", {"sampler": "host"}),
    ("--prefix-cache-bytes 3", {"prefix_cache_bytes": 3}),
    ("--prefix-cache-scope server", {"prefix_cache_scope": "server"}),
    ("--provider-option a=b", {"provider_options": (("a", "b"),)}),
    ("--host ::1 --port 3", {"address": "[::1]:3"}),
    ("--port 3 --uds a", {"address": "127.0.0.1:3", "socket_path": Path("a")}),
    ("--uds a", {"address": "unix:a"}),
    ("--port-file a", {"port_file": Path("a")}),
    ("--http-port 3", {"http_address": "127.0.0.1:3"}),
    ("--http-address b:3", {"http_address": "b:3"}),
    ("--http-port-file a", {"http_port_file": Path("a")}),
    ("--metrics-port 3", {"metrics_address": "127.0.0.1:3"}),
    ("--metrics-address unix:a", {"metrics_address": "unix:a"}),
    ("--vllm-metric-names", {"has_vllm_names": True}),
    ("--log-format json", {"format": "json"}),
    ("--log-level debug", {"level": "debug"}),
    ("--no-access-log", {"has_access_lines": False}),
    ("--otlp-endpoint a", {"otlp_endpoint": "a"}),
    ("--model-name a", {"model_name": "a"}),
    ("--generation-defaults", {"applies_generation_defaults": True}),
    ("--insecure", {"is_insecure": True}),
    ("--kserve", {"has_kserve": True}),
    ("--vllm-grpc", {"has_vllm_grpc": True}),
    ("--tls-certificate a --tls-key b", {"tls_certificate": Path("a"), "tls_key": Path("b")}),
    (
        "--tls-certificate a --tls-key b --tls-client-ca c",
        {"tls_certificate": Path("a"), "tls_key": Path("b"), "tls_client_ca": Path("c")},
    ),
    ("--keys a", {"keys": Path("a")}),
    ("--jwt-keys a --jwt-audience b", {"jwt_keys": Path("a"), "jwt_audience": "b"}),
    ("--jwt-tenant-claim a", {"jwt_tenant_claim": "a"}),
    ("--trusted-proxies 10.0.0.0/8,::1", {"trusted_proxies": ("10.0.0.0/8", "::1")}),
    ("--tenants a", {"tenants": Path("a")}),
    ("--no-open-health", {"has_open_health": False}),
    ("--audit-log a", {"audit_log": Path("a")}),
    ("--reload-every-s 3", {"reload_every_s": 3.0}),
    ("--max-context 3", {"max_context": 3}),
    ("--device cpu", {"device": "cpu"}),
    ("--isolate-engine", {"isolates_engine": True}),
    ("--costs a", {"costs_folder": Path("a")}),
    ("--refresh-costs", {"refreshes_costs": True}),
    ("--datastore a", {"datastore": "a"}),
    ("--scope server", {"history_scope": "server"}),
    ("--history-scope server", {"history_scope": "server"}),
]


@pytest.mark.parametrize(("arguments", "wanted"), OWN, ids=[one for one, _ in OWN])
def test_options_set_their_fields_and_no_others(arguments: str, wanted: dict[str, object]):
    before, after = flat(options()), flat(options(*arguments.split(" ")))
    assert {name: after[name] for name in after if after[name] != before[name]} == wanted


def test_every_option_of_one_setting_is_tried():
    tried = {one for text, _ in OWN for one in text.split() if one.startswith("--")}
    tried |= {one.replace("--no-", "--") for one in tried}
    spelled = {f"--{name.replace('_', '-')}" for name, _ in options_of(ServeOptions)}
    assert spelled - tried == {
        "--trusted-signers",  # tests/runtime/cli/test_signing.py
        "--limit",
        "--drafting",
    }


def flat(of: Any) -> dict[str, Any]:
    """Return the fields of a class of settings and of its parts by name."""
    found: dict[str, Any] = {}
    for name, known in known_of(of):
        value = getattr(of, name)
        found |= {name: value} if known.part is None else flat(value)
    return found


def test_an_address_and_a_port_are_one_too_many():
    line = refused("--http-address", "127.0.0.1:3", "--http-port", "3")
    assert "http_port: must be left out where http_address is given" in line


def test_every_limit_is_set_by_its_name():
    changed = {name: value * 2 for name, value in limits(ServeOptions()).items()}
    given = options(
        *(part for name, value in changed.items() for part in ("--limit", f"{name}={value}"))
    )
    assert limits(given) == changed


def test_every_setting_of_the_drafters_is_set_by_its_name():
    changed = asdict(DraftingConfig()) | {"window": 5, "min_prob": 0.5, "draft_passes": 2}
    pairs = {name: value for name, value in changed.items() if name in setting_names()}
    texts = [f"{name}={limits_text(value)}" for name, value in pairs.items()]
    given = options(*(part for text in texts for part in ("--drafting", text)))
    assert asdict(given.config.drafting) == changed
    assert [one.name for one in named_of(given, "drafting")] == [*setting_names()]


def test_a_preset_brings_its_drafter_and_gamma_where_none_are_given():
    paper = options("--drafting", "preset=paper")
    assert (paper.config.default_drafter, paper.config.default_gamma) == ("ouroboros", 12)
    assert not paper.leaves_drafter and not paper.leaves_gamma
    given = options("--drafting", "preset=paper", "--drafter", "model", "--gamma", "auto")
    assert (given.config.default_drafter, given.config.default_gamma) == ("model", None)
    assert options("--drafting", "preset=outrider") == options()


# What a process is given by the code that starts it.
NO_SETTINGS = {"stage"}


def no_settings(kind: type, within: Setting) -> Iterator[str]:
    for name, known in known_of(kind, within):
        if known.part is not None:
            yield from no_settings(known.part, known)
        elif known == Setting():
            yield name


def test_every_field_is_a_setting():
    assert {*no_settings(ServeOptions, Setting())} == NO_SETTINGS


def test_every_option_is_written_once_at_a_field():
    of_fields = [name for name, _ in options_of(ServeOptions)]
    assert len(of_fields) == len({*of_fields})
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, own in (("serve", set()), ("warm", set()), ("config", {"show", "as_json"})):
        of_command = {one.name for one in commands[name].params}
        assert of_command == {*of_fields, "bundle", "config", *own}
    assert all(one.help.endswith(".") for _, one in options_of(ServeOptions))


def limits_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


def test_the_page_lists_every_setting():
    page = PAGE.read_text(encoding="utf-8")
    assert page == renewed(page), "run python -m scripts.list_settings"
    for name in limits(ServeOptions()):
        assert page.count(f"| `{name}` |") == 1
