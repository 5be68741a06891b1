"""What OpenAI's client for Python makes of calls, reasoning and responses; run by tests with an address."""

import json
import sys
from typing import Any

from openai import OpenAI

address, tools = sys.argv[1], json.loads(sys.argv[2])
client = OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
model = client.models.list().data[0].id
messages: Any = [{"role": "user", "content": "Weather in Rome?"}]
asked: Any = {
    "model": model,
    "messages": messages,
    "tools": tools,
    "temperature": 0,
    "max_tokens": 300,
}


def called(calls: Any) -> list[Any]:
    return [(one.function.name, json.loads(one.function.arguments)) for one in calls or []]


whole = client.chat.completions.create(**asked).choices[0]
with client.chat.completions.stream(**asked) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_completion().choices[0]
message = whole.message
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
again = client.chat.completions.create(**asked | {"messages": [*messages, message, result]})
functions: Any = [{"type": "function", **one["function"]} for one in tools]
of_responses: Any = {"model": model, "input": "Weather?", "tools": functions, "temperature": 0}
response = client.responses.create(**of_responses)
with client.responses.stream(**of_responses) as events:
    types = [event.type for event in events]
    final = events.get_final_response()
output = [
    {"type": "function_call_output", "call_id": one.call_id, "output": "3"}
    for one in response.output
    if one.type == "function_call"
]
items: Any = [{"role": "user", "content": "Weather?"}, *response.output, *output]
answered = client.responses.create(**of_responses | {"input": items})
found = {
    "whole": [
        message.content,
        message.reasoning_content,
        called(message.tool_calls),
        whole.finish_reason,
    ],
    "streamed": [
        streamed.message.content,
        streamed.message.reasoning_content,
        called(streamed.message.tool_calls),
        streamed.finish_reason,
    ],
    "kinds": kinds,
    "again": again.choices[0].message.content,
    "response": [one.type for one in response.output],
    "final": [one.type for one in final.output],
    "text": [response.output_text, final.output_text, answered.output_text],
    "types": types,
}
print(json.dumps(found))
