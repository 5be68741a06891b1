from langchain_openai import ChatOpenAI
from people import LIMITS, MODEL, PROMPTS, QUESTION, Person, show

chat = ChatOpenAI(model=MODEL, max_retries=0, **LIMITS)
show(
    text=chat.invoke(QUESTION).content,
    streamed="".join(one.content for one in chat.stream(QUESTION)),
    people=chat.with_structured_output(Person).batch(PROMPTS),
    called=chat.with_structured_output(Person, method="function_calling").batch(PROMPTS),
)
