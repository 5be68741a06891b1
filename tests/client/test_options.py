"""What requests are built from, by keyword; ``tests/test_proto.py`` has the bytes."""

import json
from typing import get_type_hints

import pytest
from outrider import SamplingParams, build_request
from outrider.options import ChatParams, RequestOptions, SpeculationParams, build_tokenize
from outrider.v1 import inference_pb2 as wire

NAMED_OTHERWISE = {"text", "tokens", "chat", "sampling"}


def names(message: type) -> set[str]:
    return set(message.DESCRIPTOR.fields_by_name)


def test_every_field_of_the_wire_has_a_typed_name_and_the_other_way_round():
    of_chat = {name.removesuffix("_json") for name in names(wire.Chat)}
    assert {*get_type_hints(ChatParams)} == of_chat
    asked = names(wire.GenerateRequest) | names(wire.Sampling)
    assert {*get_type_hints(RequestOptions)} == asked - NAMED_OTHERWISE | of_chat
    assert {*get_type_hints(SpeculationParams)} == names(wire.Speculation)


def test_a_conversation_is_built_of_messages_with_their_other_keys_as_json():
    calls = [{"name": "f"}]
    request = build_request(
        messages=[
            {"role": "user", "content": "Grüße", "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": calls},
        ],
        tools=({"type": "function"},),
        template_arguments={"enable_thinking": False},
        continue_final_message=True,
        temperature=0.0,
    )
    first, second = request.chat.messages
    assert (first.role, first.content, first.fields_json) == ("user", "Grüße", '{"name": "Ann"}')
    other = {"content": None, "tool_calls": calls}
    assert (second.content, json.loads(second.fields_json)) == ("", other)
    assert json.loads(request.chat.tools_json) == [{"type": "function"}]
    assert json.loads(request.chat.template_arguments_json) == {"enable_thinking": False}
    assert request.chat.continue_final_message
    assert not request.chat.HasField("add_generation_prompt")
    assert request.WhichOneof("prompt") == "chat"


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        (None, {}, "one of prompt and messages"),
        (None, {"tools": []}, "one of prompt and messages"),
        (None, {"messages": None}, "one of prompt and messages"),
        ("a", {"tools": []}, "tools: only with messages"),
        ("a", {"messages": []}, "one of prompt and messages"),
        (None, {"messages": [{"content": "a"}]}, "must have a role"),
        ("a", {"temprature": 1.0, "top_q": 1}, "no such option: temprature, top_q"),
        ("a", {"text": "b", "tokens": wire.TokenIds(), "chat": wire.Chat()}, "chat, text, tokens"),
        (b"a", {}, "must be a text, a list of token ids or a GenerateRequest, not bytes"),
        (5, {}, "not int"),
        (["a"], {}, "not list"),
        ({}, {}, "not dict"),
    ],
)
def test_what_makes_no_request_is_named(prompt, options, words):
    with pytest.raises(TypeError, match=words):
        build_request(prompt, **options)


def test_a_stop_string_and_a_bad_word_may_stand_alone():
    request = build_request("a", stop="end", bad_words="bad")
    assert (list(request.stop), list(request.sampling.bad_words)) == (["end"], ["bad"])


def test_a_schema_may_be_a_dict_or_text():
    schema = {"type": "string"}
    assert json.loads(build_request("a", json_schema=schema).json_schema) == schema
    assert build_request("a", json_schema="{}").json_schema == "{}"


def test_modes_have_names():
    for mode in ("max_accept", "seed_stable", "lenient"):
        request = build_request("a", speculation={"mode": mode, "gamma": 2})
        assert wire.ExactnessMode.Name(request.speculation.mode).endswith(mode.upper())
        assert request.speculation.gamma == 2
    for mode in (2, "EXACTNESS_MODE_SEED_STABLE"):
        assert build_request("a", speculation={"mode": mode}).speculation.mode == 2
    with pytest.raises(ValueError, match="must be max_accept"):
        build_request("a", speculation={"mode": "exact"})


def test_parameters_are_not_changed_by_building():
    params = SamplingParams(stop="end", speculation={"mode": "lenient"})
    build_request("a", **params)
    assert params == {"stop": "end", "speculation": {"mode": "lenient"}}


def test_options_of_a_whole_request_are_replaced_lists_too():
    first = build_request(
        "a",
        stop=["x"],
        logit_bias={1: 2.0},
        answer_prefix_tokens=[1],
        ignore_eos=True,
        temperature=0.5,
        speculation={"gamma": 2, "branching": [2, 1]},
    )
    more = {"logit_bias": {2: 1.0}, "answer_prefix_tokens": [2], "ignore_eos": False}
    second = build_request(first, stop=["y"], speculation={"branching": [1]}, **more)
    assert (list(second.stop), list(second.answer_prefix_tokens.ids)) == (["y"], [2])
    assert (dict(second.sampling.logit_bias), second.sampling.temperature) == ({2: 1.0}, 0.5)
    assert (second.speculation.gamma, list(second.speculation.branching)) == (2, [1])
    assert not second.ignore_eos and second.text == "a"
    assert build_request(first, stop=None, temperature=None, speculation=None) == first
    assert list(build_request(first, stop=[]).stop) == []


def test_none_is_as_not_given():
    options = {"messages": None, "tools": None, "template": None, "speculation": {"gamma": None}}
    assert build_request("a", **options) == build_request("a", speculation={})
    assert build_tokenize("a", None, False, "", {"messages": None, "tools": None}).text == "a"
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert build_request(**chat, continue_final_message=None) == build_request(**chat)
