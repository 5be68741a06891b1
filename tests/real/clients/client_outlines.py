import outlines
from openai import OpenAI
from people import LIMITS, MODEL, PROMPTS, QUESTION, Person, show

model = outlines.from_openai(OpenAI(), MODEL)
show(
    text=model(QUESTION, **LIMITS),
    streamed="".join(model.stream(QUESTION, **LIMITS)),
    people=[Person.model_validate_json(model(one, Person, **LIMITS)) for one in PROMPTS],
)
