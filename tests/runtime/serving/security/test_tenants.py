"""The file of tenants: shares, certificates, and what it may not say."""

from __future__ import annotations

import pytest
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.tenant import TenantRules
from outrider.runtime.serving.security.tenants import Tenants, parse_tenants

FILE = """
[default]
requests_per_s = 2

[tenants."acme:eu"]
tokens_per_s = 1.5
burst_tokens = 100
max_slots = 3
max_queued = 7
priorities = [-5, 10]
certificates = ["spiffe://acme/web", "web.acme.example"]
scopes = ["info"]

[tenants.other]
certificates = ["other.example"]
"""


def test_shares_are_read_and_others_have_the_default():
    tenants = parse_tenants(FILE)
    assert tenants.rules_of("acme:eu") == TenantRules(
        tokens_per_s=1.5, burst_tokens=100, max_slots=3, max_queued=7, priorities=(-5, 10)
    )
    assert tenants.rules_of("nobody") == TenantRules(requests_per_s=2)
    assert tenants.scopes == {"acme:eu": {"info"}, "other": {"generate", "info"}}
    assert parse_tenants("") == Tenants()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("spiffe://acme/web",), ("acme:eu", "spiffe://acme/web")),
        (("x.example", "web.acme.example"), ("acme:eu", "web.acme.example")),
        (("spiffe://acme/web", "web.acme.example"), ("acme:eu", "web.acme.example")),
        (("spiffe://acme/web/2",), None),
        ((), None),
        (("web.acme.example", "other.example"), None),
    ],
)
def test_a_certificate_is_of_the_one_tenant_that_its_names_say(names, found):
    assert parse_tenants(FILE).of_certificate(names) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = ", "tenants: must be TOML"),
        ("a = " + "[" * 10_000, "tenants: must be TOML that is less nested"),
        ("tenant = 1", "tenants: has the unknown name 'tenant'"),
        ("tenants = 1", "tenants, tenants: must be a table"),
        ("tenants.a = 1", "tenants, tenants.a: must be a table"),
        ("default = []", "tenants, default: must be a table"),
        ("[default]\ncertificates = []", "tenants, default: has the unknown name"),
        ("[tenants.'a b']", "tenants.a b: a name must be 1..128"),
        ("[tenants.a]\nrequests = 1", "tenants.a: has the unknown name 'requests'"),
        ("[tenants.a]\nrequests_per_s = 0", "tenants.a.requests_per_s: must be a number above 0"),
        ("[tenants.a]\nrequests_per_s = nan", "must be a number above 0"),
        ("[tenants.a]\nrequests_per_s = inf", "must be a number above 0"),
        ("[tenants.a]\nrequests_per_s = true", "must be a number above 0"),
        ("[tenants.a]\nmax_slots = 1.5", "tenants.a.max_slots: must be a whole number"),
        ("[tenants.a]\npriorities = [1]", "priorities: must be the lowest and the highest"),
        ("[tenants.a]\npriorities = [2, 1]", "priorities: must be the lowest and the highest"),
        ("[tenants.a]\npriorities = [0, 101]", "within -100..100"),
        ("[tenants.a]\ncertificates = 'x'", "certificates: must be a list of texts"),
        ("[tenants.a]\ncertificates = ['']", "certificates: must be a list of texts"),
        ("[tenants.a]\nscopes = ['root']", "tenants.a: scopes must be some of"),
        ("[tenants.a]\nscopes = []", "tenants.a: scopes must be some of"),
        (
            "[tenants.a]\ncertificates = ['x']\n[tenants.b]\ncertificates = ['x']",
            "tenants.b.certificates: must name no other tenant's",
        ),
    ],
)
def test_what_the_file_may_not_say_is_refused_by_its_place(text, said):
    with pytest.raises(ConfigError, match=r"^tenants") as refusal:
        parse_tenants(text)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)
