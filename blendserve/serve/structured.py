"""Structured output: OpenAI's `response_format`, vLLM's `structured_outputs`, tools that must be called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from blendserve.engine.grammar import Grammar
from blendserve.errors import InputError
from blendserve.serve.fields import MAX_ITEMS, Body, JsonObject, Label, Text
from blendserve.serve.middleware import check_json_complexity

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class PlainFormat(Body):
    type: Literal["text", "json_object"]

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        return ANY_OBJECT if self.type == "json_object" else None


class NamedSchema(Body):
    name: Label = ""
    description: Text | None = None
    of_answer: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def schema_of_answer(self) -> Mapping[str, Any]:
        return ANY_OBJECT if self.json_schema.of_answer is None else self.json_schema.of_answer


class InlineFormat(NamedSchema):
    """A schema as OpenAI's responses and Anthropic's messages have it."""

    type: Literal["json_schema"]
    of_answer: JsonObject = Field(alias="schema")


AnyFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]
Schema = JsonObject | Text  # an object, or its JSON
Choices = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=MAX_ITEMS)]


def _of_schema(schema: dict[str, Any] | str) -> Grammar:
    if isinstance(schema, str):
        check_json_complexity(schema.encode())  # the body's check does not read texts
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise InputError(f"the schema is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError("the schema is not a JSON object")
    return Grammar.of_json(found)


MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "json": _of_schema,
    "regex": Grammar.of_regex,
    "choice": Grammar.of_choices,
    "grammar": Grammar.of_lark,
}
"""Makes the grammar of a field of vLLM, by its name."""


class StructuredOutputs(Body):
    """The field of vLLM: one of these."""

    of_json: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Structured(Body):
    """Fields of every request of OpenAI's API that say what the answer must look like; at most one may be set.

    guided_*: the names that vLLM's `structured_outputs` replaced.
    """

    response_format: AnyFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @property
    def grammar(self) -> Grammar | None:
        """Return the grammar. Raises InputError for two of the fields, and for a grammar that cannot be compiled."""
        form = self.response_format and self.response_format.schema_of_answer
        asked = self.structured_outputs.model_dump(by_alias=True) if self.structured_outputs else {}
        fields: list[tuple[str, Callable[[Any], Grammar], Any]] = [
            ("response_format", Grammar.of_json, form),
            (
                "structured_outputs.json_object",
                Grammar.of_json,
                ANY_OBJECT if asked.get("json_object") else None,
            ),
        ]
        for kind, make in MAKERS.items():
            fields.append((f"structured_outputs.{kind}", make, asked.get(kind)))
            fields.append((f"guided_{kind}", make, getattr(self, f"guided_{kind}")))
        given = [field for field in fields if field[2] is not None]
        if asked and not any(name.startswith("structured_outputs") for name, *_ in given):
            names = ", ".join((*MAKERS, "json_object"))
            raise InputError(f"structured_outputs: send one of {names}", setting="structured_outputs")
        if len(given) > 1:
            names = " and ".join(name for name, *_ in given)
            raise InputError(f"{names} exclude each other: send one of them", setting=given[1][0])
        for name, make, value in given:
            return compiled(name, make, value)
        return None


def compiled(name: str, make: Callable[[Any], Grammar], value: Any) -> Grammar:
    """Make the grammar of a field. Raises InputError with its name."""
    try:
        return make(value)
    except InputError as error:
        raise InputError(f"{name}: {error}", setting=name) from None


def forced_call(tools: Iterable[Mapping[str, Any]], name: str | None) -> Grammar:
    """A JSON object that calls the named one of these tools (a `function` of OpenAI's API: name, parameters), or any.

    Raises InputError where there is none and, with a tool's name, for parameters that cannot be compiled.
    """
    tools = [tool for tool in tools if name in (None, tool["name"])]
    if not tools:
        raise InputError("tool_choice: `tools` has no such tool", setting="tool_choice")
    calls: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["name"]},
                "arguments": tool.get("parameters") or ANY_OBJECT,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    try:
        return Grammar.of_json({"anyOf": calls})
    except InputError:
        for call in calls:  # which one it was
            compiled(f"tools.{call['properties']['name']['const']}", Grammar.of_json, call)
        raise
