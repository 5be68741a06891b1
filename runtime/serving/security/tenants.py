"""The file of tenants: their shares of the server, and whose certificates are whose.

TOML. ``[tenants.NAME]`` has fields of ``TenantRules``, ``certificates`` (subject alternative names of client
certificates: DNS names and URIs) and ``scopes`` of who comes with one. ``[default]`` has the rules of all others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.tenant import NAME, PRIORITIES, TenantRules
from outrider.runtime.serving.security.keys import parse_scopes

OPTION = "tenants"
CALLER_SCOPES = frozenset(("generate", "info"))
"""What callers may do whose credentials do not say."""
_RULES = tuple(one.name for one in fields(TenantRules))
_COUNTS = ("max_slots", "max_queued")
_MOST = 1e12


@dataclass(frozen=True, slots=True)
class Tenants:
    """What a server knows of its tenants.

    Attributes:
        rules: by name, of those that are listed.
        default: of the others.
        certificates: tenants by a name of their certificates.
        scopes: by tenant, what callers with such a certificate may do.
    """

    rules: Mapping[str, TenantRules] = field(default_factory=dict)
    default: TenantRules = field(default_factory=TenantRules)
    certificates: Mapping[str, str] = field(default_factory=dict)
    scopes: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def rules_of(self, tenant: str) -> TenantRules:
        """Return a tenant's share."""
        return self.rules.get(tenant, self.default)

    def of_certificate(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Return the tenant of a certificate and the name that says so; None where no name, or two tenants, fit."""
        found = {self.certificates[name]: name for name in names if name in self.certificates}
        return next(iter(found.items())) if len(found) == 1 else None


def parse_tenants(text: str) -> Tenants:
    """Return what a file of tenants says.

    Raises:
        ConfigError: it is no TOML, or has a name or a value that it may not; it says which.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The place, not the line itself.
        raise ConfigError(OPTION, f"must be TOML: {error}") from None
    except RecursionError:
        raise ConfigError(OPTION, "must be TOML that is less nested") from None
    _check_names(OPTION, data, ("default", "tenants"))
    rules: dict[str, TenantRules] = {}
    certificates: dict[str, str] = {}
    scopes: dict[str, frozenset[str]] = {}
    for tenant, section in _table(f"{OPTION}, tenants", data.get("tenants", {})).items():
        where = f"{OPTION}, tenants.{tenant}"
        if not NAME.fullmatch(tenant):
            raise ConfigError(where, "a name must be 1..128 characters of [A-Za-z0-9._:-]")
        section = _table(where, section)
        _check_names(where, section, (*_RULES, "certificates", "scopes"))
        rules[tenant] = _rules(where, section)
        for name in _texts(f"{where}.certificates", section.get("certificates", [])):
            if certificates.setdefault(name, tenant) != tenant:
                raise ConfigError(f"{where}.certificates", "must name no other tenant's")
        words = section.get("scopes")
        scopes[tenant] = CALLER_SCOPES if words is None else _scopes(where, words)
    default = _table(f"{OPTION}, default", data.get("default", {}))
    _check_names(f"{OPTION}, default", default, _RULES)
    return Tenants(rules, _rules(f"{OPTION}, default", default), certificates, scopes)


def _rules(where: str, section: Mapping[str, Any]) -> TenantRules:
    values = {name: section[name] for name in _RULES if name in section}
    for name, value in values.items():
        if name == "priorities":
            values[name] = _priorities(f"{where}.{name}", value)
        elif not _is_number(value) or not 0 < value <= _MOST:
            raise ConfigError(f"{where}.{name}", "must be a number above 0")
        elif name in _COUNTS and not isinstance(value, int):
            raise ConfigError(f"{where}.{name}", "must be a whole number")
    return TenantRules(**values)


def _priorities(where: str, value: object) -> tuple[int, int]:
    lowest, highest = PRIORITIES
    rule = f"must be the lowest and the highest, within {lowest}..{highest}"
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int for one in value):
        raise ConfigError(where, rule)
    first, last = value
    if not lowest <= first <= last <= highest:
        raise ConfigError(where, rule)
    return first, last


def _scopes(where: str, words: object) -> frozenset[str]:
    return parse_scopes(where, _texts(f"{where}.scopes", words))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _texts(where: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(where, "must be a list of texts")
    return value


def _table(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(where, "must be a table")
    return value


def _check_names(where: str, section: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in section:
        if name not in known:
            raise ConfigError(where, f"has the unknown name {name!r}; known: {', '.join(known)}")
