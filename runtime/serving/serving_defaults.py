"""A server's settings where a bundle has defaults of its own and the operator left them open."""

from __future__ import annotations

from dataclasses import replace

from outrider.engines.bundle.serving_defaults import ServingDefaults
from outrider.runtime.core.config import ServerConfig


def with_bundle_defaults(
    config: ServerConfig,
    defaults: ServingDefaults | None,
    *,
    leaves_drafter: bool,
    leaves_gamma: bool,
) -> tuple[ServerConfig, str | None]:
    """The settings to serve with, and a line that says what the bundle decided; None for nothing.

    A gamma was found for its drafter, so it is taken only with that drafter.

    Args:
        config: what the operator said, and built-in defaults.
        defaults: the bundle's.
        leaves_drafter: whether the bundle may choose the drafter.
        leaves_gamma: whether it may choose gamma.

    Raises:
        ConfigError: a default of the bundle is out of range.
    """
    if defaults is None:
        return config, None
    taken = []
    if leaves_drafter:
        config = replace(config, default_drafter=defaults.drafter)
        taken.append(f"drafter {defaults.drafter}")
    if config.default_drafter == defaults.drafter:
        if leaves_gamma:
            config = replace(config, default_gamma=defaults.gamma)
            taken.append(f"gamma {'auto' if defaults.gamma is None else defaults.gamma}")
        # The window is the target's with lookahead, else the draft model's.
        window = "window" if "lookahead" in defaults.drafter else "draft_window"
        for name, key in (
            ("phrase_length", "phrase_length"),
            ("num_phrases", "num_phrases"),
            ("window", window),
        ):
            if (value := getattr(defaults, name)) is not None:
                config = replace(config, drafting=replace(config.drafting, **{key: value}))
                taken.append(f"{name} {value}")
    if not taken:
        return config, None
    return config, f"{', '.join(taken)}: the bundle's serving defaults ({defaults.source})"
