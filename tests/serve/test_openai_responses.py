"""POST /v1/responses, by OpenAI's own client: the same answers as a chat's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http import MODEL, OWN, Server, asked, serving
from tests.support.messages import FUNCTION, INPUT, SAID, SCRIPT

URL, CHAT = "/v1/responses", "/v1/chat/completions"
TOOL = {"type": "function", **FUNCTION}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "index"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, Any] = {"engine": {"decode": {"max_new_tokens": None}}, "has_index": request.param}
    with serving(tmp_path_factory.mktemp("responses"), **options) as made:
        yield made


@pytest.mark.parametrize("model", [MODEL, f"{MODEL}:chat", None])
def test_an_answer_is_that_of_a_chat(server: Server, model: str | None) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        *asked("Hello."),
        {"role": "assistant", "content": "Hi."},
    ]
    said += asked()
    named: dict[str, Any] = {"model": model} if model else {}
    named |= {"x_blendserve": {"method": "full"}}  # over an index, the first answer stores chunks
    chat = server.post(CHAT, {**named, "messages": said, "max_tokens": 9}).json()
    items = [
        {**message, "content": [{"type": "input_text", "text": message["content"]}]} for message in said[1:]
    ]
    for given in (said[1:], items):
        body = {**named, "instructions": "Be brief.", "input": given, "max_output_tokens": 9}
        found = server.post(URL, body).json()
        assert found["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert (found["status"], found["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert found["usage"]["output_tokens"] == 9
        assert found["model"] == chat["model"]


def test_the_official_client_reads_it_whole_and_streamed(server: Server) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "Who sat on the mat?", "max_output_tokens": 9}
    # over an index, the first answer stores chunks
    fields |= {"extra_body": {"x_blendserve": {"method": "full"}}}
    whole = server.openai.responses.create(**fields)
    with server.openai.responses.stream(**fields) as events:
        found: list[Any] = list(events)
    kinds, streamed = [event.type for event in found], found[-1].response
    assert (
        "".join(event.delta for event in found if event.type == "response.output_text.delta")
        == whole.output_text
    )
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert streamed.output_text == whole.output_text
    assert kinds[:4] == [
        f"response.{kind}" for kind in ("created", "in_progress", "output_item.added", "content_part.added")
    ]
    assert kinds[-1] == "response.incomplete"
    assert whole.usage
    assert whole.usage.output_tokens == 9


def test_an_answer_may_follow_a_schema(server: Server) -> None:
    form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    found = server.openai.responses.create(model=MODEL, input="Who?", text={"format": form})  # type: ignore[call-overload]
    assert json.loads(found.output_text).keys() == {"age"}
    assert found.status == "completed"


def test_documents_are_chunks_of_the_prompt(server: Server) -> None:
    found = server.post(URL, {"input": "Who?", "documents": OWN[:2], "max_output_tokens": 3}).json()
    chat = {"messages": asked("Who?"), "documents": OWN[:2], "max_tokens": 3}
    tokens = server.post(CHAT, chat).json()["usage"]["prompt_tokens"]
    assert found["usage"]["input_tokens"] == tokens


def test_an_agent_calls_a_function_and_sends_its_result(scripted: Server) -> None:
    client = scripted.openai.responses
    said: list[Any] = [*asked()]
    first: Any = client.create(model=MODEL, input=said, tools=[TOOL])  # type: ignore[list-item]
    text, call = first.output
    assert text.content[0].text == SAID
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", TOOL["name"], INPUT)
    with client.stream(model=MODEL, input=said, tools=[TOOL]) as events:  # type: ignore[list-item]
        streamed: Any = events.get_final_response()
    assert [item.type for item in streamed.output] == ["message", "function_call"]
    assert json.loads(streamed.output[1].arguments) == INPUT
    said += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
    again = client.create(model=MODEL, input=said, tools=[TOOL])  # type: ignore[list-item]
    assert again.usage
    assert first.usage
    assert again.usage.input_tokens > first.usage.input_tokens
    plain = client.create(model=MODEL, input="Hi.")
    assert plain.output_text == "".join(SCRIPT)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": "Hi.", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "Hi.", "background": True}, "background"),
        ({"input": "Hi.", "top_logprobs": 3}, "top_logprobs"),
        ({"input": "Hi.", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "Hi.", "tool_choice": "required"}, "tool_choice"),
        ({"input": "Hi.", "model": "other"}, "other"),
    ],
    ids=str,
)
def test_what_needs_a_memory_or_cannot_be_read_is_refused(
    server: Server, fields: dict[str, Any], named: str
) -> None:
    for stream in (False, True):
        refused = server.post(URL, {**fields, "stream": stream})
        assert refused.status_code in (400, 404)
        error = refused.json()["error"]
        assert named in f"{error['param']} {error['message']}"
