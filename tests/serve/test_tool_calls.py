"""Tool calls are found in every form, wherever the text is cut; anything else stays text, character for character."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.serve.tool_calls import Call, Schemas, ToolCallParser
from tests.support.http import MODEL, Server, asked, serving
from tests.support.messages import (
    COUNT,
    FUNCTION,
    INPUT,
    SAID,
    SCRIPT,
    TOOL,
    URL,
    assembled,
    body,
    same,
    stream,
)
from tests.support.scripted import scripted_model

NAMES = ["get_weather", "f", "weather", "na\u00efve-tool"]
TOOLS: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
Calls = list[tuple[str, dict[str, Any]]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def listed(key: str, calls: Calls) -> str:
    return dumps([{"name": name, key: arguments} for name, arguments in calls])


def joined(between: str, key: str, calls: Calls) -> str:
    return between.join(dumps({"name": name, key: arguments}) for name, arguments in calls)


SPACE, QUOTED = "\n" + 20 * " ", ['"type"', ":", '"function"', ",", '"name"', ":"]
FORMS: dict[str, Callable[[Calls], str]] = {
    "Hermes": lambda calls: "\n".join(hermes(*call) for call in calls),
    "Hermes without its last end": lambda calls: FORMS["Hermes"](calls).removesuffix("</tool_call>"),
    "Mistral": lambda calls: f"[TOOL_CALLS] {listed('arguments', calls)}",
    "Mistral without its marker": lambda calls: listed("arguments", calls),
    "new Mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(args)}" for name, args in calls),
    "new Mistral without its markers": lambda calls: "".join(f"{name}{dumps(args)}" for name, args in calls),
    "Llama": lambda calls: f"<|python_tag|>{joined('; ', 'parameters', calls)}",
    "Llama without its marker": lambda calls: joined(";", "parameters", calls),
    "Llama with types": lambda calls: "\n".join(
        dumps({"type": "function", "name": name, "parameters": arguments}) for name, arguments in calls
    ),
    "Llama with white space": lambda calls: "".join(
        f'{SPACE.join(["{", *QUOTED, dumps(name)])}, "parameters":\n\t{dumps(args)} }}'
        for name, args in calls
    ),
}

FORMS |= {
    "Command R": lambda calls: (
        "<|START_ACTION|>"
        + dumps([{"tool_call_id": "0", "tool_name": name, "parameters": args} for name, args in calls])
    ),
    "Command R without its marker": lambda calls: FORMS["Command R"](calls).removeprefix("<|START_ACTION|>"),
    "DeepSeek": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(args)}\n```<｜tool▁call▁end｜>"
            for name, args in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "DeepSeek 3.1": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(args)}<｜tool▁call▁end｜>"
            for name, args in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "gpt-oss": lambda calls: "".join(
        f"commentary to=functions.{name} <|constrain|>json<|message|>{dumps(args)}<|call|>"
        for name, args in calls
    ),
    "fence": lambda calls: f"```json\n{joined(chr(10), 'arguments', calls)}\n```",
}
PYTHON: dict[str, Callable[[Calls], str]] = {
    "Llama 4": lambda calls: f"[{', '.join(python(*call) for call in calls)}]",
    "LFM2": lambda calls: (
        f"<|tool_call_start|>[{', '.join(python(*call) for call in calls)}]<|tool_call_end|>"
    ),
    "Gemma": lambda calls: "```tool_code\n" + "\n".join(python(*call) for call in calls) + "\n```",
}
TEXTS: dict[str, Callable[[Calls], str]] = {
    "Qwen3-Coder": lambda calls: "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in args.items())
        + "</function>\n</tool_call>"
        for name, args in calls
    ),
    "GLM": lambda calls: "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{written(value)}</arg_value>\n"
            for key, value in args.items()
        )
        + "</tool_call>"
        for name, args in calls
    ),
}


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def written(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)
PROSE = st.text(st.sampled_from("Ab,.:;}]>\n "), max_size=12)
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "<|python_tag|>",
                '"name"',
                '"arguments"',
                ":",
            ),
            *(
                '"f"',
                "f{}",
                '{"name": "f"}',
                '{"name": "f", "arguments": {"a": "}"}}',
                "get_",
                "weather{",
                '"weather"',
            ),
            *(
                "{",
                "}",
                "[",
                "]",
                ",",
                ";",
                " ",
                "\n",
                "\t" * 9,
                "a",
                "<",
                '"',
                "\\",
                '"type": "function"',
                "\u00e9",
            ),
        ]
    ),
    max_size=14,
).map("".join)
CUTS = st.lists(st.integers(1, 9), max_size=60)


def split_calls(text: str, tools: Schemas) -> tuple[str, list[Call]]:
    """The text of a whole answer without its calls, and the calls."""
    parser = ToolCallParser(tools)
    shown, first = parser.push(text)
    rest, last = parser.finish()
    return shown + rest, [*first, *last]


def streamed(text: str, cuts: Sequence[int], names: Sequence[str] = NAMES) -> tuple[str, Calls]:
    """The text and the calls of pieces of these lengths, and of the rest."""
    parser, shown, calls = ToolCallParser({name: {} for name in names}), "", list[Call]()
    for length in (*cuts, len(text)):
        more, found = parser.push(text[:length])
        shown, calls, text = shown + more, calls + found, text[length:]
    rest, last = parser.finish()
    return shown + rest, [(call.name, call.input) for call in calls + last]


@pytest.mark.parametrize("form", FORMS)
@given(calls=CALLS, prose=PROSE, cuts=CUTS)
def test_calls_of_every_form_are_found_behind_any_text(
    form: str, calls: Calls, prose: str, cuts: list[int]
) -> None:
    before = prose.rstrip()[-1:]
    prose += "." if before.isalnum() or before == "," else ""  # else a longer name, or a longer list
    assert streamed(prose + FORMS[form](calls) + "\n", cuts) == (prose.rstrip(), calls)


IDENTIFIERS = st.sampled_from(["a", "b_1", "city"])
ARGUMENTS = st.dictionaries(IDENTIFIERS, VALUES, max_size=3)
PYTHON_CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS), min_size=1, max_size=3)
TEXT = st.text(st.sampled_from("Ab c\n{}[]\"'="), max_size=12).map(str.strip)
TEXT_ARGUMENTS = st.dictionaries(IDENTIFIERS, TEXT | st.integers() | st.booleans(), max_size=3)
TEXT_CALLS = st.lists(st.tuples(st.sampled_from(NAMES), TEXT_ARGUMENTS), min_size=1, max_size=3)


@pytest.mark.parametrize("form", PYTHON)
@given(calls=PYTHON_CALLS, cuts=CUTS)
def test_calls_in_python_are_found(form: str, calls: Calls, cuts: list[int]) -> None:
    assert streamed("I look.\n" + PYTHON[form](calls), cuts) == ("I look.", calls)


@pytest.mark.parametrize("form", TEXTS)
@given(calls=TEXT_CALLS, cuts=CUTS)
def test_arguments_in_tags_are_read_by_their_schema(form: str, calls: Calls, cuts: list[int]) -> None:
    for name, arguments in calls:
        kinds = {key: {"type": "string"} for key, value in arguments.items() if isinstance(value, str)}
        tools = {**TOOLS, name: {"type": "object", "properties": kinds}}
        text, found = split_calls("I look.\n" + TEXTS[form]([(name, arguments)]), tools)
        assert (text, [(call.name, call.input) for call in found]) == ("I look.", [(name, arguments)])
    plain = [(name, dict.fromkeys(arguments, 1)) for name, arguments in calls]
    assert streamed("I look.\n" + TEXTS[form](plain), cuts) == ("I look.", plain)


def test_a_damaged_call_does_not_spoil_the_others() -> None:
    good, damaged = hermes("f", {"a": 1}), '<tool_call>\n{"name": "f", "argu\n</tool_call>'
    for text in (good + damaged + good, damaged + good + good):
        shown, calls = split_calls(text, TOOLS)
        assert shown == damaged
        assert [call.input for call in calls] == [{"a": 1}, {"a": 1}]
    cut = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "argu'
    assert [call.input for call in split_calls(cut, TOOLS)[1]] == [{"a": 1}]


def test_a_call_is_sent_as_soon_as_it_ends() -> None:
    parser, found = ToolCallParser(TOOLS), list[int]()
    text = "\n".join(hermes("f", {"a": i}) for i in range(3))
    for character in text:
        found.append(len(parser.push(character)[1]))
    ends = [i for i, n in enumerate(found) if n]
    assert ends == [text.index(">", text.index(f'"a": {i}')) for i in range(3)]


@given(st.lists(st.tuples(PROSE, CALLS), max_size=3), PROSE, CUTS)
def test_text_between_and_behind_calls_stays(
    parts: list[tuple[str, Calls]], last: str, cuts: list[int]
) -> None:
    """White space in front of a call goes with it, and at the end of an answer with calls."""
    text = "".join(prose + FORMS["Hermes"](calls) for prose, calls in parts) + last
    expected = "".join(prose.rstrip() for prose, _ in parts) + (last if last.strip() or not parts else "")
    assert streamed(text, cuts) == (expected, [call for _, calls in parts for call in calls])


@given(FRAGMENTS, CUTS)
def test_cuts_change_nothing(text: str, cuts: list[int]) -> None:
    whole, calls = split_calls(text, TOOLS)
    assert streamed(text, cuts) == (whole, [(call.name, call.input) for call in calls])
    assert calls or whole == text


@given(FRAGMENTS, CUTS)
def test_without_a_known_name_all_is_text(text: str, cuts: list[int]) -> None:
    for names in ([], ["g", "some_other"]):
        assert streamed(text, cuts, names) == (text, [])


@given(CALLS, CUTS)
def test_an_answer_that_is_cut_within_its_call_is_text(calls: Calls, cuts: list[int]) -> None:
    for form in ("Hermes", "Mistral without its marker", "new Mistral", "DeepSeek", "fence"):
        text = FORMS[form](calls[:1])
        text = text[: text.rindex("}")]
        assert streamed(text, cuts) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {}} is how a tool is called.',
        'Write {"name": "f", "arguments": {}} or\n```json\n{"name": "f", "parameters": {"a": 1}}\n``` to call it.',
        '[{"name": "f", "arguments": {}}, {"name": "unknown", "arguments": {}}]',
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        r'<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>',
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 100_000,
        '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 500 + "1" + "}" * 501 + "</tool_call>",
        "forget_weather{}",
        "re-weather{}",
        "f {}",
        "[TOOL_CALLS]",
        "<|python_tag|>print(f{1})",
        "",
        " \n",
    ],
    ids=range(20),
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert split_calls(text, TOOLS) == (text, [])


def test_arguments_may_be_written_as_a_text_or_left_out_or_come_first() -> None:
    for written, arguments in (
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"arguments": {"a": "two\nlines"}, "name": "f"}', {"a": "two\nlines"}),
    ):
        _, calls = split_calls(f"<tool_call>{written}</tool_call>", TOOLS)
        assert [(call.name, call.input) for call in calls] == [("f", arguments)]
        assert json.loads(calls[0].arguments) == arguments


def test_text_is_shown_while_it_comes() -> None:
    """No more is held back than a call's beginning is long, even where brackets and names are all over."""
    line = 'if (a[0] < b["name"]) {\n\treturn {"name": "search engine", "x": [1, {"y": "<tool>"}]};\n}\n'
    text, parser, shown = 20 * line, ToolCallParser({"search": {}}), ""
    for n, character in enumerate(text, 1):
        shown += parser.push(character)[0]
        assert len(text[:n].rstrip()) - len(shown) <= len('{"name": "search"')
    assert shown + parser.finish()[0] == text
    assert ToolCallParser({"search": {}}).push("Hello {x") == ("Hello {x", [])


# Over HTTP, by a model that always writes the same answer


def test_calls_are_tool_use_blocks(scripted: Server) -> None:
    request = body(tools=[TOOL], max_tokens=50, x_blendserve={"method": "full"})
    message = scripted.post(URL, request).json()
    text, use = message["content"]
    assert text == {"type": "text", "text": SAID}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_weather", INPUT)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["output_tokens"] == len(SCRIPT)
    streamed = assembled(stream(scripted, request))
    assert same(streamed) == same(message)
    turns = [*asked(), {"role": "assistant", "content": message["content"]}]
    result = [{"type": "tool_result", "tool_use_id": use["id"], "content": "Rain."}]
    again = {**request, "messages": [*turns, {"role": "user", "content": result}]}
    n_tokens = scripted.post(COUNT, again).json()["input_tokens"]
    assert (
        scripted.post(URL, again).json()["usage"]["input_tokens"]
        == n_tokens
        > message["usage"]["input_tokens"]
    )


def test_why_an_answer_ends(scripted: Server) -> None:
    written = "".join(SCRIPT)
    for fields, text, reason, sequence in (
        ({"max_tokens": 50}, written, "end_turn", None),
        ({"max_tokens": 100_000}, written, "end_turn", None),  # more than the context has
        ({"max_tokens": 50, "tools": [TOOL], "tool_choice": {"type": "none"}}, written, "end_turn", None),
        ({"max_tokens": 1, "tools": [TOOL]}, SCRIPT[0], "max_tokens", None),
        ({"max_tokens": 3, "tools": [TOOL]}, "".join(SCRIPT[:3]), "max_tokens", None),
        ({"max_tokens": 50, "stop_sequences": ["up", " it"]}, SCRIPT[0], "stop_sequence", " it"),
        ({"max_tokens": 50, "stop_sequences": ["Let"]}, "", "stop_sequence", "Let"),
    ):
        for message in (
            scripted.post(URL, body(**fields)).json(),
            assembled(stream(scripted, body(**fields))),
        ):
            assert "".join(block["text"] for block in message["content"]) == text
            assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_openais_client_gets_calls(scripted: Server) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    done = scripted.chat(tools=tools, max_tokens=50)
    (call,) = done.choices[0].message.tool_calls
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (SAID, "tool_calls")
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        INPUT,
    )
    create: Any = scripted.openai.chat.completions.stream
    with create(model=MODEL, messages=asked(), tools=tools, max_tokens=50) as events:
        final = events.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == (SAID, "tool_calls")
    (streamed,) = final.message.tool_calls
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("get_weather", INPUT)
    assert streamed.id.startswith("call_")
    assert streamed.id != call.id
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    again = scripted.chat([*asked(), done.choices[0].message.to_dict(), result], tools=tools, max_tokens=1)
    assert again.choices[0].finish_reason == "length"


def test_without_offered_tools_calls_are_text(scripted: Server) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    other = [{"type": "function", "function": {**FUNCTION, "name": "other"}}]
    for fields in ({}, {"tools": tools, "tool_choice": "none"}, {"tools": other}):
        choice = scripted.chat(max_tokens=50, **fields).choices[0]
        chunks = [chunk.choices[0] for chunk in scripted.chat(max_tokens=50, stream=True, **fields)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
        assert chunks[-1].finish_reason == choice.finish_reason
        assert (choice.message.content, choice.finish_reason) == ("".join(SCRIPT), "stop")
        assert choice.message.tool_calls is None


@pytest.mark.parametrize(
    "arguments", ["no JSON", r'{"a": "\ud800"}', "[" * 500 + "]" * 500, "[" * 50_000, ""]
)
def test_arguments_that_are_no_object_are_read_as_text(scripted: Server, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Rain."},
    ]
    sent = {"model": MODEL, "messages": [*asked(), *said], "max_tokens": 1}
    response = scripted.post("/v1/chat/completions", sent)
    assert response.status_code == (400 if len(arguments) > 10_000 else 200)  # the context has 1,024 tokens


def test_a_schema_with_half_a_character_is_refused(scripted: Server) -> None:
    tool = {"type": "function", "function": {**FUNCTION, "parameters": {"description": "\ud800"}}}
    content = json.dumps({"model": MODEL, "messages": asked(), "tools": [tool]})
    response = scripted.http.post(
        "/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400


def test_a_message_of_calls_alone_has_no_content(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Calls are numbered, and an answer that is cut behind one of them says so."""
    inputs, tools = [{"city": "a"}, {"city": "b"}], [{"type": "function", "function": FUNCTION}]
    model = scripted_model(*(hermes("get_weather", each) + "\n" for each in inputs))
    with serving(tmp_path_factory.mktemp("calls"), model=model, has_index=False) as server:
        create: Any = server.openai.chat.completions.stream
        with create(model=MODEL, messages=asked(), tools=tools) as events:
            streamed = events.get_final_completion().choices[0].message
        for message in (streamed, server.chat(tools=tools).choices[0].message):
            assert not message.content
            assert [json.loads(call.function.arguments) for call in message.tool_calls] == inputs
        assert message.content is None
        cut = server.chat(tools=tools, max_tokens=1).choices[0]
        assert (len(cut.message.tool_calls), cut.finish_reason) == (1, "length")
        told = assembled(stream(server, body(tools=[TOOL])))
        assert [block["input"] for block in told["content"]] == inputs
