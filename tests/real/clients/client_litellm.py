import litellm
from people import BASE_URL, LIMITS, MODEL, PROMPTS, QUESTION, Person, show


def ask(prompt, **options):
    return litellm.completion(
        model=f"openai/{MODEL}",
        api_base=BASE_URL,
        messages=[{"role": "user", "content": prompt}],
        num_retries=0,
        **LIMITS,
        **options,
    )


show(
    text=ask(QUESTION).choices[0].message.content,
    streamed="".join(one.choices[0].delta.content or "" for one in ask(QUESTION, stream=True)),
    people=[
        Person.model_validate_json(ask(one, response_format=Person).choices[0].message.content)
        for one in PROMPTS
    ],
)
