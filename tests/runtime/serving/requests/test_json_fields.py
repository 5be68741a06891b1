"""Fields of a request that are set by their names in JSON."""

from __future__ import annotations

import pytest
from outrider.runtime.addons.kserve.options import add_options
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.serving.requests.json_fields import JsonFields
from outrider.v1 import inference_pb2 as wire

from tests.runtime.serving.requests.test_checks import RULES

NAMES = frozenset({"answer_prefix", "answer_prefix_tokens"})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("answer_prefix", "Die"), ("answer_prefix_tokens", [1, 2])),
        (("answer_prefix_tokens", [1, 2]), ("answer_prefix", "Die")),
    ],
)
def test_of_fields_that_exclude_one_another_the_second_is_refused(first, second) -> None:
    request = wire.GenerateRequest()
    fields = JsonFields(request, RULES, NAMES)
    assert fields.set(*first)
    with pytest.raises(RequestError, match=f"must not stand beside {first[0]}") as caught:
        fields.set(*second)
    assert caught.value.field == second[0]
    assert request.WhichOneof("answer") == first[0]


def test_of_several_unknown_options_the_same_is_named_whatever_their_order() -> None:
    for names in (("zz", "aa"), ("aa", "zz")):
        with pytest.raises(UnsupportedOption) as caught:
            add_options(wire.GenerateRequest(), dict.fromkeys(names, 1), RULES)
        assert caught.value.field == "sampling_parameters.aa"
