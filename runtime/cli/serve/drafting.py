"""Options of ``outrider serve``: how it drafts, and what it keeps of earlier requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.cli.serve.settings import merge_pairs
from outrider.runtime.core.config import MOST_COUNT
from outrider.runtime.core.drafting import (
    AUTO_DRAFTERS,
    DraftingConfig,
    HistoryScope,
    parse_settings,
)
from outrider.runtime.core.errors import ConfigError

PANEL = "Drafting and caches"
ALL_AUTO = ",".join(AUTO_DRAFTERS)

Gamma = Annotated[
    str | None,
    typer.Option(
        help="Draft tokens per step, or auto: what gains most. Default: as tuned.",
        rich_help_panel=PANEL,
    ),
]
BlockVerification = Annotated[
    bool,
    typer.Option(help="Judge sampled drafts of max_accept as whole blocks.", rich_help_panel=PANEL),
]
Costs = Annotated[
    Path | None,
    typer.Option(
        help="Folder for measured step costs; default: by the bundle.", rich_help_panel=PANEL
    ),
]
RefreshCosts = Annotated[bool, typer.Option(help="Measure step costs anew.", rich_help_panel=PANEL)]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Name (see outrider info), or auto. Default: as tuned, or model.",
        rich_help_panel=PANEL,
    ),
]
AutoDrafters = Annotated[
    str,
    typer.Option(
        help="Names that drafter auto chooses among by speed, favourite first.",
        rich_help_panel=PANEL,
    ),
]
Datastore = Annotated[
    Path | None,
    typer.Option(help="Corpus made by outrider datastore build.", rich_help_panel=PANEL),
]
Scope = Annotated[
    str,
    typer.Option(
        "--scope",
        "--history-scope",
        help="Whose earlier answers a request may profit from: request, tenant or server.",
        rich_help_panel=PANEL,
    ),
]
Drafting = Annotated[
    list[str] | None,
    typer.Option(
        help="Setting of the drafters, NAME=VALUE; repeat for several.",
        callback=merge_pairs,
        rich_help_panel=PANEL,
    ),
]
PrefixCacheBytes = Annotated[
    int,
    typer.Option(
        help="Memory for caches of earlier prompts and answers; 0: none.",
        rich_help_panel=PANEL,
    ),
]
PrefixCacheScope = Annotated[
    str,
    typer.Option(
        help="Whose prompts and answers a request may find: tenant or server.",
        rich_help_panel=PANEL,
    ),
]


def default_gamma(text: str) -> int | None:
    """Return draft tokens per step; None for auto.

    Raises:
        ConfigError: it is neither auto nor a count.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > len(str(MOST_COUNT)):
        raise ConfigError("gamma", f"must be auto or a number of at most {MOST_COUNT}")
    return int(text)


def history_scope(key: str, scope: str) -> HistoryScope:
    """Return the scope of this name.

    Raises:
        ConfigError: there is none; ``key`` is named.
    """
    if scope not in set(HistoryScope):
        raise ConfigError(key, f"must be one of {', '.join(HistoryScope)}")
    return HistoryScope(scope)


def drafting_config(datastore: Path | None, scope: str, settings: Sequence[str]) -> DraftingConfig:
    """Return the drafters' settings; those of ``settings`` are NAME=VALUE.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    return DraftingConfig(
        datastore="" if datastore is None else str(datastore),
        history_scope=history_scope("scope", scope),
        **parse_settings(settings),  # type: ignore[arg-type]
    )
