"""What a caller presents is shown to nobody by accident."""

from __future__ import annotations

from outrider.runtime.serving.security.authenticator import PresentedCredentials


def test_a_header_is_in_no_repr():
    presented = PresentedCredentials(
        authorization="Bearer outrider_secret", certificate_names=("acme",)
    )
    assert "secret" not in repr(presented)
    assert "acme" in repr(presented)
