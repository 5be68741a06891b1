"""What every script here asks for: twenty people, each an object of eight fields."""

from __future__ import annotations

import json
import os
import sys

from pydantic import BaseModel, Field

BASE_URL, MODEL = f"{sys.argv[1]}/v1", sys.argv[2]
KEY = "any"
LIMITS = {"max_tokens": 512, "temperature": 0.0}
JOBS = [
    "baker",
    "nurse",
    "pilot",
    "judge",
    "farmer",
    "plumber",
    "singer",
    "tailor",
    "miner",
    "actor",
]
PLACES = ["Lisbon", "Oslo"]
PROMPTS = [f"Invent a {job} who lives in {place}." for job in JOBS for place in PLACES]
QUESTION = "What is the capital of France? Answer in one word."


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=30)
    age: int = Field(ge=18, le=90)
    job: str = Field(max_length=30)
    city: str = Field(max_length=30)
    country: str = Field(max_length=30)
    email: str = Field(max_length=40)
    hobby: str = Field(max_length=40)
    is_student: bool


def show(**found: object) -> None:
    """Print what a client was told."""
    print(json.dumps(found, default=lambda one: one.model_dump()))


os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"] = KEY, BASE_URL
