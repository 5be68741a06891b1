from people import BASE_URL, KEY, LIMITS, MODEL, PROMPTS, QUESTION, Person, show
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
text = Agent(model).run_sync(QUESTION, model_settings=LIMITS).output
native, called = (
    Agent(model, output_type=kind, retries=0) for kind in (NativeOutput(Person), Person)
)
show(
    text=text,
    people=[native.run_sync(one, model_settings=LIMITS).output for one in PROMPTS],
    called=[called.run_sync(one, model_settings=LIMITS).output for one in PROMPTS],
)
