"""The gateway smg in front of our server, and openai's client in front of that.

Part of ``scripts/test --long``: a bundle of its own, and two environments made from the package index.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from outrider import Client
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.settings import ServeOptions

from tests.environments import Environments
from tests.runtime.served import begin, server_of

GATEWAY = "smg==1.13.0"
CLIENT = "openai==3.54.0"
TEMPLATE = (
    "{{ bos_token }}{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": TEMPLATE,
}
PROMPT = "the quick brown"
NOISE = 0.1
MESSAGES = [{"role": "user", "content": "once upon a time"}]
CALLS = """
import json, sys, time
import openai

client = openai.OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="none", max_retries=0)
asked = json.loads(sys.argv[2])
deadline = time.monotonic() + 60
while True:
    try:
        models = [one.id for one in client.models.list()]
    except openai.APIError:
        models = []
    if models or time.monotonic() > deadline:
        break
    time.sleep(0.2)
told = {"models": models}
model = models[0]
GREEDY = {"model": model, "temperature": 0, "max_tokens": 24}

def usage(found):
    details = found.completion_tokens_details
    return [
        found.prompt_tokens, found.completion_tokens,
        details.accepted_prediction_tokens, details.rejected_prediction_tokens,
    ]

one = client.completions.create(prompt=asked["prompt"], **GREEDY)
told["completion"] = [one.choices[0].text, one.choices[0].finish_reason, usage(one.usage)]
text, found = "", None
for part in client.completions.create(
    prompt=asked["prompt"], stream=True, stream_options={"include_usage": True}, **GREEDY
):
    text += part.choices[0].text if part.choices else ""
    found = part.usage or found
told["completion stream"] = [text, usage(found)]
one = client.chat.completions.create(messages=asked["messages"], **GREEDY)
told["chat"] = [one.choices[0].message.content, one.choices[0].finish_reason, usage(one.usage)]
text, found = "", None
for part in client.chat.completions.create(
    messages=asked["messages"], stream=True, stream_options={"include_usage": True}, **GREEDY
):
    text += (part.choices[0].delta.content or "") if part.choices else ""
    found = part.usage or found
told["chat stream"] = [text, usage(found)]
several = client.completions.create(
    model=model, prompt=asked["prompt"], n=2, seed=3, temperature=1.0, max_tokens=8
)
told["several"] = [one.text for one in several.choices]
formed = client.chat.completions.create(
    messages=asked["messages"], model=model, temperature=1.0, seed=1, max_tokens=40,
    response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab", 12]}}},
)
told["formed"] = formed.choices[0].message.content
try:
    client.completions.create(prompt="a " * 400, **GREEDY)
except openai.APIStatusError as error:
    told["too long"] = error.status_code
print(json.dumps(told))
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def chat_bundle(
    tiny_checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny target with a chat template, and a draft that is often right: the target with noise on its weights."""
    import torch
    from outrider.export.pipeline import ExportOptions, export_bundle
    from transformers import LlamaForCausalLM

    root = tmp_path_factory.mktemp("chat")
    target, draft, bundle = root / "target", root / "draft", root / "bundle"
    shutil.copytree(tiny_checkpoints[0], target)
    (target / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    shutil.copytree(target, draft)
    model = LlamaForCausalLM.from_pretrained(draft)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(NOISE * weight.std() * torch.randn_like(weight))
    model.save_pretrained(draft)
    export_bundle(
        target=target,
        draft=draft,
        out=bundle,
        options=ExportOptions(max_context=256, max_batch=4, max_gamma=8),
        progress=lambda stage: None,
    )
    return bundle


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def gateway(smg: Path, worker_port: int, log: Path) -> AsyncIterator[int]:
    """The port of a gateway whose only worker is our server."""
    port = free_port()
    command = [
        *(smg, "launch", "--backend", "vllm", "--worker-urls", f"grpc://127.0.0.1:{worker_port}"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
    ]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
        try:
            yield port
        finally:
            process.terminate()
            await process.wait()


async def told_by(python: Path, port: int) -> dict[str, Any]:
    asked = json.dumps({"prompt": PROMPT, "messages": MESSAGES})
    process = await asyncio.create_subprocess_exec(
        *(python, "-c", CALLS, str(port), asked),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    told: dict[str, Any] = json.loads(out)
    return told


async def test_openais_client_through_the_gateway(
    chat_bundle: Path, environments: Environments, tmp_path: Path, caplog
):
    smg = environments.python(GATEWAY).with_name("smg")
    python = environments.python(CLIENT)
    options = ServeOptions(
        config=ServerConfig(default_gamma=4, lb_delay_s=0.0, drain_timeout_s=0.0),
        has_vllm_grpc=True,
    )
    opened = load_model(chat_bundle, options)
    caplog.clear()
    server = server_of(opened, options=options)
    port = await begin(server, opened)
    greedy = {"temperature": 0.0, "max_tokens": 24}
    async with Client(f"127.0.0.1:{port}") as client:
        completion = (await client.complete(PROMPT, **greedy)).outputs[0]
        chat = (await client.complete(messages=MESSAGES, **greedy)).outputs[0]
        num_prompt = len(await client.tokenize(PROMPT))
        num_chat = len(await client.tokenize(messages=MESSAGES))
        async with gateway(smg, port, tmp_path / "log") as gateway_port:
            told = await told_by(python, gateway_port)
    server.hurry()
    await server.drain()
    opened.close()
    assert told["models"] == [opened.model.name]
    for name, num, own in (("completion", num_prompt, completion), ("chat", num_chat, chat)):
        report = own.speculation
        usage = [num, 24, report.num_accepted, report.num_drafted - report.num_accepted]
        assert told[name] == [own.text, "length", usage]
        assert told[f"{name} stream"] == [own.text, usage]
        assert 0 < report.num_accepted < report.num_drafted
    assert len({*told["several"]}) == 2
    assert json.loads(told["formed"]) in ("ab", 12)
    assert 400 <= told["too long"] < 500
    assert [one for one in caplog.records if one.levelname in ("ERROR", "CRITICAL")] == []
