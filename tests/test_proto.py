"""The committed stubs are those that the .proto files generate, and the wire says its defaults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from outrider import Client, build_request
from outrider.v1 import inference_pb2 as wire

from scripts import list_fields

ROOT = Path(__file__).parents[1]
STUBS = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")


def test_committed_stubs_are_up_to_date(tmp_path):
    script = ROOT / "scripts" / "gen_proto.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True)
    for name in STUBS:
        committed = ROOT / "proto" / "outrider" / "v1" / name
        assert (tmp_path / "outrider" / "v1" / name).read_text() == committed.read_text(), name


def test_every_request_field_is_commented_with_its_default():
    text = (ROOT / "proto/outrider/v1/inference.proto").read_text()
    messages = dict(re.findall(r"^message (\w+) \{\n(.*?)^\}", text, re.S | re.M))
    for name in ("GenerateRequest", "Sampling", "Speculation"):
        comment = ""
        for line in map(str.strip, messages[name].splitlines()):
            if line.startswith("//"):
                comment += line
            elif re.search(r"= \d+;$", line):
                is_prompt = re.search(r" (text|tokens|chat|json_schema|grammar) = ", line)
                assert is_prompt or "efault" in comment, f"{name}: {line}"
                comment = ""


def test_build_request_puts_options_where_they_belong():
    request = build_request("a", temperature=0.5, max_tokens=3, speculation={"gamma": 0})
    assert (request.text, request.max_tokens, request.sampling.temperature) == ("a", 3, 0.5)
    assert request.speculation.HasField("gamma") and not request.sampling.HasField("top_p")
    assert build_request([1, 2]).tokens.ids == [1, 2]
    assert build_request([]).WhichOneof("prompt") == "tokens"
    assert build_request(wire.GenerateRequest(text="b"), seed=1).sampling.seed == 1


def test_build_request_refuses_a_name_that_no_field_has():
    with pytest.raises(TypeError, match="temprature"):
        build_request("a", temprature=1.0)


def test_build_request_takes_messages_as_other_libraries_have_them():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "é"}]}
    request = build_request(
        messages=[{"role": "user", "content": "a", "name": "Ann"}, call, {"role": "tool"}],
        tools=[{"name": "f"}],
        template_arguments={"x": False},
        max_tokens=3,
    )
    assert request.max_tokens == 3
    assert request.chat == wire.Chat(
        messages=[
            wire.ChatMessage(role="user", content="a", fields_json='{"name": "Ann"}'),
            wire.ChatMessage(
                role="assistant",
                fields_json='{"content": null, "tool_calls": [{"name": "é"}]}',
            ),
            wire.ChatMessage(role="tool", fields_json='{"content": null}'),
        ],
        tools_json='[{"name": "f"}]',
        template_arguments_json='{"x": false}',
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt": "a", "messages": []},
        {"messages": [{"content": "a"}]},
        {"prompt": "a", "tools": []},
        {"messages": [{"role": "user", "x": object()}]},
    ],
)
def test_build_request_takes_a_prompt_or_messages(options):
    with pytest.raises(TypeError):
        build_request(**options)


def test_client_is_what_the_package_gives():
    assert Client.__module__ == "outrider.client"


# Of the stubs before encoder-decoder models, by their own serializer.
@pytest.mark.parametrize(
    ("message", "data"),
    [
        (
            build_request(
                "ab",
                max_tokens=3,
                temperature=0.0,
                top_k=5,
                min_p=0.25,
                min_tokens=2,
                num_beams=2,
                early_stopping=True,
                exhaustive_search=True,
                seed=7,
                speculation={"gamma": 3},
            ),
            "120261622218090000000000000000100521000000000000d03f58026007280372021803b00102c00101c80101",
        ),
        (wire.TokenizeRequest(text="ab", add_special_tokens=False), "0a0261621000"),
        (
            wire.GetServerInfoResponse(
                server_version="0.2",
                model="m",
                vocab_size=9,
                limits=wire.Limits(max_context=8, max_beams=2),
            ),
            "0a03302e3212016d18092a050808900102",
        ),
    ],
    ids=["generate", "tokenize", "info"],
)
def test_what_older_clients_and_servers_say_is_the_same_bytes(message, data):
    assert message.SerializeToString(deterministic=True).hex() == data
    assert type(message).FromString(bytes.fromhex(data)) == message


def test_an_answer_prefix_of_token_ids_is_built_from_a_list():
    request = build_request("a", answer_prefix_tokens=[3, 4], target_language="de")
    assert list(request.answer_prefix_tokens.ids) == [3, 4]
    assert request.WhichOneof("answer") == "answer_prefix_tokens"
    assert request.target_language == "de"
    assert build_request("a", answer_prefix="b").WhichOneof("answer") == "answer_prefix"


def test_the_page_of_all_fields_is_in_step() -> None:
    assert list_fields.PAGE.read_text() == list_fields.page(), "run python -m scripts.list_fields"
