from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from people import BASE_URL, KEY, MODEL, PROMPTS, QUESTION, Person, show

llm = OpenAILike(
    model=MODEL,
    api_base=BASE_URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    max_tokens=512,
    temperature=0.0,
    max_retries=0,
)
asked = [ChatMessage(role="user", content=QUESTION)]
people = llm.as_structured_llm(Person)
show(
    text=llm.chat(asked).message.content,
    streamed="".join(one.delta for one in llm.stream_chat(asked)),
    people=[people.chat([ChatMessage(role="user", content=one)]).raw for one in PROMPTS],
)
