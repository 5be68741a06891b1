from openai import OpenAI
from people import LIMITS, MODEL, PROMPTS, QUESTION, Person, show

client = OpenAI()


def messages(prompt):
    return [{"role": "user", "content": prompt}]


whole = client.chat.completions.create(model=MODEL, messages=messages(QUESTION), **LIMITS)
stream = client.chat.completions.create(
    model=MODEL, messages=messages(QUESTION), stream=True, **LIMITS
)
parsed = [
    client.chat.completions.parse(
        model=MODEL, messages=messages(prompt), response_format=Person, **LIMITS
    )
    .choices[0]
    .message.parsed
    for prompt in PROMPTS
]
response = client.responses.create(
    model=MODEL, input=QUESTION, max_output_tokens=512, temperature=0.0
)
show(
    text=whole.choices[0].message.content,
    streamed="".join(one.choices[0].delta.content or "" for one in stream if one.choices),
    response=response.output_text,
    people=parsed,
)
