"""Answers that follow a grammar, as clients ask for it: JSON schemas, expressions, choices, tools that must be called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http import MODEL, OWN, Client, Server, asked, serving
from tests.support.messages import TOOL
from tests.support.messages import URL as MESSAGES

CHAT = "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "hotels")
]
UNKNOWN = {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}
NAMED = {"type": "function", "function": {"name": "hotels"}}
DEEP: dict[str, Any] = {"type": "integer"}  # deeper than llguidance reads
for _ in range(64):
    DEEP = {"type": "array", "items": {"type": "array", "items": DEEP}}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "index"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, Any] = {"engine": {"decode": {"max_new_tokens": None}}, "has_index": request.param}
    with serving(tmp_path_factory.mktemp("structured"), **options) as made:
        yield made


def answered(client: Client, path: str = CHAT, **fields: Any) -> Any:
    given = {"prompt": "Who?"} if path.endswith("/completions") and path != CHAT else {"messages": asked()}
    response = client.post(path, {"model": MODEL, **given, "max_tokens": 90, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def text(client: Client, **fields: Any) -> str:
    """The answer, which must have ended by itself."""
    choice = answered(client, **fields)["choices"][0]
    assert choice["finish_reason"] == "stop"
    found: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return found


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"guided_json": json.dumps(PERSON)},
        {"structured_outputs": {"json": PERSON}},
        {"response_format": FORMAT, "path": "/v1/completions"},
        {"response_format": FORMAT, "frequency_penalty": 2, "top_k": 3},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_json_ends_by_itself_and_is_valid(server: Server, fields: Any, temperature: float) -> None:
    value = json.loads(text(server, temperature=temperature, **fields))
    assert list(value) == ["name", "age"]
    assert len(value["name"]) <= 8
    assert isinstance(value["age"], int)
    assert value["age"] <= 99


def test_an_object_is_json_as_far_as_it_goes(server: Server) -> None:
    choice = answered(server, response_format={"type": "json_object"}, temperature=1)["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_choice": ['yes, "now"', "nö\n", "😀"]}, {'yes, "now"', "nö\n", "😀"}),
        ({"structured_outputs": {"regex": "a{2,3}b"}}, {"aab", "aaab"}),
        ({"guided_grammar": 'start: "x" y\ny: "1" | "2"'}, {"x1", "x2"}),
    ],
    ids=["choice", "regex", "grammar"],
)
def test_choices_expressions_and_rules(server: Server, fields: Any, expected: set[str]) -> None:
    assert {text(server, temperature=2, seed=seed, **fields) for seed in range(3)} <= expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "hotels"}), (NAMED, {"hotels"})])
def test_a_tool_that_must_be_called_is_called(
    server: Server, choice: Any, names: set[str], stream: bool
) -> None:
    fields = {"model": MODEL, "messages": asked(), "tools": FUNCTIONS, "tool_choice": choice}
    client = server.openai.chat.completions
    if stream:
        chunks = [chunk.choices[0] for chunk in client.create(**fields, stream=True) if chunk.choices]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        ended, content = chunks[-1].finish_reason, "".join(chunk.delta.content or "" for chunk in chunks)
    else:
        done = client.create(**fields).choices[0]
        calls, ended, content = done.message.tool_calls, done.finish_reason, done.message.content or ""
    (call,) = calls
    assert (ended, content) == ("tool_calls", "")
    assert call.function.name in names
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": TOOL["name"]}])
def test_anthropics_clients_force_tools_and_formats(server: Server, choice: Any) -> None:
    tool = {**TOOL, "input_schema": CITY}
    done = answered(server, MESSAGES, tools=[tool], tool_choice=choice)
    assert done["stop_reason"] == "tool_use"
    assert [block["type"] for block in done["content"]] == ["tool_use"]
    assert done["content"][0]["input"]["city"] in ("Paris", "Rome")
    config = {"format": {"type": "json_schema", "schema": PERSON}}
    assert json.loads(answered(server, MESSAGES, output_config=config)["content"][0]["text"]).keys() == {
        "name",
        "age",
    }


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "not",
        ),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a(?=b)"}, "look"),
        ({"guided_grammar": "start: nothing"}, "nothing"),
        ({"guided_regex": "a", "response_format": FORMAT}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "[" * 5000}, "guided_json"),
        ({"guided_json": '{"a": ' * 5000 + "1" + "}" * 5000}, "guided_json"),
        ({"guided_json": DEEP}, "levels deep"),
        ({"guided_json": json.dumps(DEEP)}, "guided_json"),
        ({"guided_regex": "(a{1000}){1000}"}, "grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [*FUNCTIONS, UNKNOWN]}, "tools.odd"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": FUNCTIONS}, "tool_choice"),
        ({"tool_choice": "required", "tools": FUNCTIONS, "response_format": FORMAT}, "tool_choice"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_named(server: Server, fields: Any, named: str) -> None:
    refused = server.post(CHAT, {"model": MODEL, "messages": asked(), **fields})
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"] + str(refused.json()["error"]["param"])


def test_documents_and_a_format_go_together(server: Server) -> None:
    done = answered(server, documents=OWN[:2], response_format=FORMAT)
    assert json.loads(done["choices"][0]["message"]["content"]).keys() == {"name", "age"}
    assert len(done["x_blendserve"]["passages"]) == 2
