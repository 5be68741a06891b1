"""The committed stubs are those that the .proto files generate, and the wire says its defaults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from outrider import Client, build_request
from outrider.v1 import inference_pb2 as wire

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
                is_prompt = re.search(r" (text|tokens|json_schema|grammar) = ", line)
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


def test_client_is_what_the_package_gives():
    assert Client.__module__ == "outrider.client"
