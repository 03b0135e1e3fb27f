"""What a grammar lets a model write is valid by the schema that it was made of, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from blendserve.config import DecodeConfig
from blendserve.engine.grammar import Grammar, Guide
from blendserve.engine.sampler import Sampler
from blendserve.errors import InputError
from tests.support.engines import toy_model

jsonschema = pytest.importorskip("jsonschema")
MAX_TOKENS = 100
CLOSING = 6.0  # what tokens that close a string, a list or an object gain: else a random model would write on
Schemas = st.SearchStrategy[dict[str, Any]]

names = st.sampled_from(["a", "b_1", "ünï", "two words", 'quo"te', ""])
scalars = st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=6)


def ranges(low: str, high: str, values: st.SearchStrategy[Any]) -> Schemas:
    """Both limits, either or none, in their order."""
    return st.tuples(values, values, st.booleans(), st.booleans()).map(
        lambda given: {
            **({low: min(given[:2])} if given[2] else {}),
            **({high: max(given[:2])} if given[3] else {}),
        }
    )


def of_type(name: str, *fields: Schemas) -> Schemas:
    return st.tuples(*fields).map(
        lambda found: {"type": name, **{k: v for each in found for k, v in each.items()}}
    )


leaves: Schemas = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 5}]),
    st.sampled_from([{"type": ["integer", "null"]}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
    of_type("integer", ranges("minimum", "maximum", st.integers(-999, 999))),
    of_type("number", ranges("minimum", "maximum", st.integers(-9, 9))),
    of_type("string", ranges("minLength", "maxLength", st.integers(0, 6))),
    st.lists(scalars, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    scalars.map(lambda value: {"const": value}),
    st.sampled_from([{"type": "integer", "multipleOf": 3}, {"not": {"type": "null"}}, {"minimum": 2}]),
)


def composed(inner: Schemas) -> Schemas:
    properties = st.dictionaries(names, inner, max_size=3)
    objects = st.tuples(properties, st.booleans(), st.booleans()).map(
        lambda given: {
            "type": "object",
            "properties": given[0],
            **({"required": sorted(given[0])} if given[1] else {}),
            **({} if given[2] else {"additionalProperties": {"type": "null"}}),
        }
    )
    lists = st.tuples(inner, ranges("minItems", "maxItems", st.integers(0, 3))).map(
        lambda given: {"type": "array", "items": given[0], **given[1]}
    )
    choices = st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
    return st.one_of(objects, lists, choices)


nested = st.recursive(leaves, composed, max_leaves=5)
LIST: dict[str, Any] = {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/x"}}
schemas = nested | nested.map(lambda each: {**LIST, "$defs": {"x": each}})


def written(grammar: Grammar, seed: int, temperature: float) -> str | None:
    """What random logits write; None if they have not come to an end."""
    model, generator = toy_model(), torch.Generator().manual_seed(seed)
    sampler = Sampler(DecodeConfig(temperature=temperature, seed=seed), guide=Guide(grammar, model))
    closing = closing_tokens()
    tokens = list[int]()
    while len(tokens) < MAX_TOKENS:
        logits = torch.randn(model.decoder.vocab_size, generator=generator) * 3
        logits[: len(closing)][closing] += CLOSING
        token = sampler(logits)
        if token in model.end_tokens:
            return str(model.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        tokens.append(token)
    return None


@cache
def closing_tokens() -> torch.Tensor:
    """Which tokens of the toy model close something."""
    tokenizer = toy_model().tokenizer
    texts = map(tokenizer.backend_tokenizer.id_to_token, range(len(tokenizer)))
    return torch.tensor([bool(re.search(r'["}\]]', str(text))) for text in texts])


@given(schemas, st.integers(0, 99), st.sampled_from([0.0, 1.0]))
def test_what_is_written_is_valid_by_its_schema(
    schema: dict[str, Any], seed: int, temperature: float
) -> None:
    try:
        text = written(Grammar.of_json(schema), seed, temperature)
    except InputError:  # a keyword that is not known
        event("refused")
        return
    assume(text is not None)
    jsonschema.validate(json.loads(text or ""), schema)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_allowed_tokens_are_drawn_by_their_probabilities_among_each_other(top_p: float) -> None:
    """The likeliest token of all is not allowed."""
    model, n = toy_model(), 600
    ids = [model.tokenizer(text)["input_ids"][0] for text in "abc?"]
    logits = torch.full((model.decoder.vocab_size,), -20.0)
    logits[ids] = torch.tensor([2.0, 1.0, 0.0, 2.5])
    grammar, drawn = Grammar.of_choices(["a", "b", "c"]), Counter[int]()
    for seed in range(n):
        config = DecodeConfig(temperature=1.0, top_p=top_p, seed=seed)
        drawn[Sampler(config, guide=Guide(grammar, model))(logits)] += 1
    shares = torch.softmax(logits[ids[:3]], 0)
    shares = shares if top_p == 1 else torch.tensor([1.0, 0.0, 0.0])
    assert drawn.total() == sum(drawn[token] for token in ids[:3])
    for token, share in zip(ids, shares.tolist(), strict=False):
        assert abs(drawn[token] - n * share) <= 4.5 * (n * share * (1 - share)) ** 0.5 + 1e-6


def test_objects_end_with_the_properties_that_are_listed() -> None:
    """Where the schema says nothing of others; a property may be named like a keyword, and a default is no schema."""
    inner = {"type": "object", "properties": {"properties": {"type": "null"}}, "required": ["properties"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"], "default": {"properties": {}}}
    for seed in range(5):
        assert json.loads(written(Grammar.of_json(schema), seed, 1.0) or "") == {"a": {"properties": None}}
    either = {"anyOf": [inner, {**inner, "properties": {"b": {"type": "null"}}, "required": ["b"]}]}
    found = [json.loads(written(Grammar.of_json(either), seed, 1.0) or "") for seed in range(9)]
    assert {tuple(each) for each in found} == {("properties",), ("b",)}


@pytest.mark.parametrize("form", [{}, {"indent": 2}, {"indent": 4}, {"separators": (",", ":")}], ids=str)
def test_json_may_be_indented_as_models_write_it(form: dict[str, Any]) -> None:
    model = toy_model()
    text = json.dumps({"a": [1, {"b": "two words"}], "c": None}, **form)
    guide = Guide(Grammar.of_json({"type": "object"}), model)
    for token in model.tokenizer(text, add_special_tokens=False)["input_ids"]:
        assert guide.allows(token)
        guide.push(token)
    assert int(guide.restrict(torch.zeros(model.decoder.vocab_size)).argmax()) in model.end_tokens


def test_spaces_do_not_go_on_without_end() -> None:
    model = toy_model()
    texts = [model.tokenizer.decode([token]) for token in range(model.decoder.vocab_size)]
    blank = torch.tensor([not text.strip() for text in texts]) * 100.0
    sampler = Sampler(DecodeConfig(), guide=Guide(Grammar.of_json({"const": {"a": [1, 2]}}), model))
    found = [sampler(blank) for _ in range(200)]
    assert json.loads(model.tokenizer.decode(found[: found.index(min(model.end_tokens))])) == {"a": [1, 2]}


@given(
    st.from_regex(re.compile(r"[abc]{1,3}(?:\[[xyz]\]\{1,3\}|\([de]{2}\|f+\))g?"), fullmatch=True),
    st.integers(0, 9),
)
def test_a_text_matches_its_expression(pattern: str, seed: int) -> None:
    text = written(Grammar.of_regex(pattern), seed, 0.0)
    assume(text is not None)
    assert re.fullmatch(pattern, text or "")


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4), st.integers(0, 9))
def test_one_of_the_choices_is_written(choices: list[str], seed: int) -> None:
    tokenizer = toy_model().tokenizer
    assume(all(tokenizer.decode(tokenizer(choice)["input_ids"]) == choice for choice in choices))
    try:
        grammar = Grammar.of_choices(choices)
    except InputError:
        assert any(not choice.isprintable() for choice in choices)
        return
    assert written(grammar, seed, 1.0) in choices


@pytest.mark.parametrize("depth", [200, 5000])
def test_a_schema_that_is_nested_too_deeply_is_an_error(depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InputError):
        Grammar.of_json(schema)


def test_what_no_token_can_spell_is_an_error() -> None:
    """The vocabulary has no token for the first byte of this character."""
    with pytest.raises(InputError):
        written(Grammar.of_choices(["\U0008a49a"]), 0, 1.0)
