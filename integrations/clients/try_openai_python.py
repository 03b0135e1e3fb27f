# /// script
# dependencies = ["openai", "pydantic"]
# ///
from checks import ASKED, MODEL, check
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI()
messages = [{"role": "user", "content": ASKED}]


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


tools = [{"type": "function", "function": {"name": "save", "parameters": Person.model_json_schema()}}]
chat = client.chat.completions
check("models", lambda: client.models.list().data)
check("chat", lambda: chat.create(model=MODEL, messages=messages).choices[0].message.content)
check(
    "stream",
    lambda: "".join(
        c.choices[0].delta.content or "" for c in chat.create(model=MODEL, messages=messages, stream=True)
    ),
)
check(
    "parse",
    lambda: chat.parse(model=MODEL, messages=messages, response_format=Person).choices[0].message.parsed,
)
check(
    "json_object",
    lambda: chat.create(
        model=MODEL, messages=messages, max_tokens=99, response_format={"type": "json_object"}
    ),
)
check(
    "tool_choice required",
    lambda: (
        chat.create(model=MODEL, messages=messages, tools=tools, tool_choice="required")
        .choices[0]
        .message.tool_calls
    ),
)
check(
    "tool_choice named",
    lambda: (
        chat.create(
            model=MODEL,
            messages=messages,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": "save"}},
        )
        .choices[0]
        .message.tool_calls
    ),
)
check("n", lambda: len(chat.create(model=MODEL, messages=messages, n=3, max_tokens=9).choices) == 3)
check(
    "logprobs",
    lambda: (
        chat.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=2, max_tokens=3)
        .choices[0]
        .logprobs.content
    ),
)
check(
    "penalties, logit_bias",
    lambda: chat.create(
        model=MODEL,
        messages=messages,
        presence_penalty=0.6,
        frequency_penalty=0.1,
        logit_bias={"7": -100},
        max_tokens=9,
    ),
)
check(
    "stops",
    lambda: chat.create(model=MODEL, messages=messages, stop=[f"stop{i}" for i in range(12)], max_tokens=9),
)
check(
    "completions, list",
    lambda: len(client.completions.create(model=MODEL, prompt=["a b", "c d"], max_tokens=4).choices) == 2,
)
check(
    "completions, token ids",
    lambda: client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=4).choices,
)
check(
    "responses", lambda: client.responses.create(model=MODEL, input=ASKED, max_output_tokens=30).output_text
)
check(
    "responses, parse",
    lambda: client.responses.parse(model=MODEL, input=ASKED, text_format=Person).output_parsed,
)
check("embeddings", lambda: client.embeddings.create(model=MODEL, input=["a", "b"]).data[1].embedding)
