"""A server of letters with HTTP beside gRPC."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from tests.runtime.serving.http.client import Http, serving_http

StartHttp = Callable[..., AbstractAsyncContextManager[Http]]


@pytest.fixture
def start_http(start) -> StartHttp:
    """As ``start``, with HTTP."""
    return partial(serving_http, start)
