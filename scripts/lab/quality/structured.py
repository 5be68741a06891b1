"""How many of 20 chats with a JSON schema of eight fields end as an object of these fields, and in how many tokens.

python -m scripts.lab.quality.structured BUNDLE --temperature 1.0
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from outrider import LLM, SamplingParams

_TEXTS = {"name": 40, "email": 40, "city": 30, "note": 80}
PROPERTIES: dict[str, Any] = {
    **{name: {"type": "string", "maxLength": most} for name, most in _TEXTS.items()},
    "age": {"type": "integer"},
    "active": {"type": "boolean"},
    "role": {"enum": ["admin", "user", "guest"]},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": [*PROPERTIES],
    "additionalProperties": False,
}
PEOPLE = [
    "Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov", "Donald Knuth",
    "John McCarthy", "Ken Thompson", "Dennis Ritchie", "Margaret Hamilton", "Linus Torvalds", "Guido van Rossum",
    "Radia Perlman", "Tim Berners-Lee", "Leslie Lamport", "Tony Hoare", "Niklaus Wirth", "Frances Allen",
    "Claude Shannon", "Katherine Johnson",
]  # fmt: skip


def is_complete(text: str) -> bool:
    """Return whether a text is JSON with the schema's fields."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() == PROPERTIES.keys()


def main(
    bundle: Annotated[Path, typer.Argument(help="With a chat template.")],
    temperature: float = 0.0,
    max_tokens: int = 512,
    seed: int = 1,
) -> None:
    """Print one line."""
    wanted = f"as JSON with {', '.join(PROPERTIES)}"
    asked = [f"Make up a user profile of {one} {wanted}." for one in PEOPLE]
    params = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, seed=seed, json_schema=json.dumps(SCHEMA)
    )
    llm = LLM(bundle)
    answers = [
        one.outputs[0]
        for one in llm.chat([[{"role": "user", "content": text}] for text in asked], params)
    ]
    num_complete = sum(is_complete(one.text) for one in answers)
    lengths = [len(one.token_ids) for one in answers]
    typer.echo(
        f"{num_complete} of {len(answers)} complete; {sum(lengths)} tokens, {max(lengths)} at most"
    )


if __name__ == "__main__":
    typer.run(main)
