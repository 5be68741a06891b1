"""What openai's Python client makes of a server; run in an environment of its own, it prints an object of JSON.

When it has printed "block" it waits for a line, behind which the server is full.
"""

import json
import sys

import openai

base, key = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{base}/v1", api_key=key)
found = {"models": [one.id for one in client.models.list()]}
model = found["models"][0]

completion = client.completions.create(
    model=model, prompt="Hello", max_tokens=3, temperature=0, logprobs=1, echo=True
)
choice = completion.choices[0]
found["completion"] = {
    "text": choice.text,
    "tokens": choice.logprobs.tokens,
    "values": choice.logprobs.token_logprobs,
    "tops": choice.logprobs.top_logprobs,
    "finish_reason": choice.finish_reason,
    "usage": completion.usage.model_dump(),
    "request_id": completion._request_id,
}

asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
chat = client.chat.completions.create(**asked, max_tokens=4, logprobs=True, top_logprobs=1, n=2)
found["chat"] = [one.message.content for one in chat.choices]
found["chat_logprobs"] = [one.logprob for one in chat.choices[0].logprobs.content]
chunks = list(
    client.chat.completions.create(
        **asked, max_completion_tokens=4, stream=True, stream_options={"include_usage": True}
    )
)
found["streamed"] = "".join(one.choices[0].delta.content or "" for one in chunks[:-1])
found["roles"] = [one.choices[0].delta.role for one in chunks[:-1]]
found["last"] = [len(chunks[-1].choices), chunks[-1].usage.completion_tokens]

parsed = client.chat.completions.create(
    **asked,
    max_tokens=60,
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}, {"a": 2}]}},
    },
    extra_body={"speculation": {"drafter": "none"}, "cache_salt": "pepper", "priority": 1},
)
found["form"] = json.loads(parsed.choices[0].message.content)

for name, call in {
    "not_found": lambda: client.completions.create(model="other", prompt="Hello"),
    "bad_field": lambda: client.completions.create(model=model, prompt="Hello", temperature=2.5),
    "no_key": lambda: openai.OpenAI(base_url=f"{base}/v1", api_key="wrong").models.list(),
}.items():
    try:
        call()
    except openai.APIStatusError as error:
        found[name] = [type(error).__name__, error.status_code, error.code, error.param]

stream = client.completions.create(
    model=model,
    prompt="Hello",
    max_tokens=1_000_000,
    stream=True,
    extra_headers={"x-request-timeout-ms": "1000"},
    extra_body={"ignore_eos": True},
)
try:
    found["stream"] = [one.choices[0].text for one in stream]
except openai.APIError as error:
    found["mid_stream"] = [type(error).__name__, error.code, error.message]

print("block", flush=True)
sys.stdin.readline()
# Refused until a slot is free; the client comes back when it is told to.
patient = client.with_options(max_retries=50)
again = patient.completions.create(model=model, prompt="Hello", max_tokens=2)
found["retried"] = again.usage.completion_tokens
print(json.dumps(found))
