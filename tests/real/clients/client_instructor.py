import instructor
from openai import OpenAI
from people import LIMITS, MODEL, PROMPTS, Person, show

people = {}
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(OpenAI(), mode=mode)
    people[mode.name] = [
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            response_model=Person,
            max_retries=0,
            **LIMITS,
        )
        for prompt in PROMPTS
    ]
show(people=people["JSON_SCHEMA"], called=people["TOOLS"])
