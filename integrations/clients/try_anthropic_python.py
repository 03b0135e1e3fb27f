# /// script
# dependencies = ["anthropic"]
# ///
from anthropic import Anthropic
from checks import ASKED, MODEL, PERSON, URL, check

client = Anthropic(base_url=URL)
messages = [{"role": "user", "content": ASKED}]
tools = [{"name": "save", "description": "Saves a person.", "input_schema": PERSON}]
create = client.messages.create


def stream():
    with client.messages.stream(model=MODEL, max_tokens=40, messages=messages) as events:
        return events.get_final_text()


check("messages", lambda: create(model=MODEL, max_tokens=40, messages=messages).content[0].text)
check("stream", stream)
check("count_tokens", lambda: client.messages.count_tokens(model=MODEL, messages=messages).input_tokens)
check(
    "tool_choice any",
    lambda: (
        create(model=MODEL, max_tokens=99, messages=messages, tools=tools, tool_choice={"type": "any"})
        .content[0]
        .input["age"]
        >= 0
    ),
)
check(
    "tool_choice tool",
    lambda: (
        create(
            model=MODEL,
            max_tokens=99,
            messages=messages,
            tools=tools,
            tool_choice={"type": "tool", "name": "save"},
        )
        .content[0]
        .input
    ),
)
check("tools, auto", lambda: create(model=MODEL, max_tokens=40, messages=messages, tools=tools).content)
check(
    "output_config",
    lambda: (
        create(
            model=MODEL,
            max_tokens=99,
            messages=messages,
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
        )
        .content[0]
        .text.startswith("{")
    ),
)
