"""Tokens against transformers' own generate; text against decoding everything at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from blendserve.blend.prefill import Prefilled, prefill
from blendserve.config import BlendConfig, DecodeConfig
from blendserve.engine.generation import Sampler, TextStream, generate
from blendserve.models.forward import append
from tests.support.blending import assert_near, lay, model_says, some_ids, some_prompt
from tests.support.models import KINDS, TINY, tiny_adapter
from tests.support.tokenizers import bundled_tokenizer, spaced_tokenizer

PROMPT, NEW = some_prompt([9, 14]), 24


def greedy(name: str, end: set[int], **options: Any) -> list[int]:
    done, config = prefilled(name), DecodeConfig(max_new_tokens=NEW, **options)
    return list(generate(tiny_adapter(name), done.cache, len(PROMPT), done.logits, config, end))


def prefilled(name: str) -> Prefilled:
    adapter = tiny_adapter(name)
    return prefill(adapter, PROMPT, lay(adapter, PROMPT), BlendConfig(policy="all"), NEW)


@pytest.mark.parametrize("name", ["llama", *KINDS])
def test_greedy_equals_transformers_generate(name: str) -> None:
    model: Any = tiny_adapter(name).model
    prompt = torch.tensor([PROMPT.ids])
    said = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=96
    )
    wanted = said[0, prompt.shape[1] :].tolist()
    wanted = wanted[: wanted.index(96)] if 96 in wanted else wanted
    assert greedy(name, {96}) == wanted


@pytest.mark.parametrize("name", TINY)
def test_each_step_has_the_models_logits(name: str) -> None:
    adapter, done, tail = tiny_adapter(name), prefilled(name), some_ids(NEW, 7)
    steps = [append(adapter, done.cache, len(PROMPT) + i, (token,))[0] for i, token in enumerate(tail)]
    assert_near(torch.stack(steps), model_says(adapter, PROMPT.ids + tail).logits[0, -NEW:])


def test_an_end_token_ends_it_and_is_not_part_of_the_answer() -> None:
    free = greedy("llama", set())
    assert len(free) == NEW
    end = free[10]
    assert greedy("llama", {end}) == free[: free.index(end)]
    assert greedy("llama", {free[0]}) == []


def test_streams_may_be_interleaved() -> None:
    names, config = ("llama", "qwen3", "llama"), DecodeConfig(max_new_tokens=NEW)
    runs = []
    for name in names:
        done = prefilled(name)
        runs.append(generate(tiny_adapter(name), done.cache, len(PROMPT), done.logits, config, set()))
    turns = zip(*runs, strict=True)
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == [greedy(name, set()) for name in names]


def expected(logits: torch.Tensor, temperature: float, top_p: float) -> dict[int, float]:
    """The nucleus, one token at a time: the smallest set of most likely tokens that reaches top_p."""
    p = torch.softmax(logits.double() / temperature, 0).tolist()
    kept: dict[int, float] = {}
    for token in sorted(range(len(p)), key=lambda t: -p[t]):
        kept[token] = p[token]
        if sum(kept.values()) >= top_p:
            break
    return {token: share / sum(kept.values()) for token, share in kept.items()}


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6), (2.0, 0.9), (1.0, 1e-6)]
)
def test_sampling_follows_the_nucleus_distribution(temperature: float, top_p: float) -> None:
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0, 1.4])
    sampler, n = Sampler(DecodeConfig(temperature=temperature, top_p=top_p, seed=1)), 4000
    seen = Counter(sampler(logits) for _ in range(n))
    wanted = expected(logits, temperature, top_p)
    assert set(seen) == set(wanted)
    for token, share in wanted.items():
        sigma = (n * share * (1 - share)) ** 0.5
        assert abs(seen[token] - n * share) <= 4.5 * sigma


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1e-320, 1.0), (1e-7, 0.5), (1.0, 5e-324), (100.0, 1e-45)]
)
def test_settings_that_no_float_can_hold_are_greedy(temperature: float, top_p: float) -> None:
    logits = torch.linspace(-50.0, 50.0, 300)[torch.randperm(300)]
    chosen = Sampler(DecodeConfig(temperature=temperature, top_p=top_p))(logits)
    assert chosen == int(logits.argmax())


def test_a_seed_gives_one_text_and_another_seed_another() -> None:
    one, again, other = (greedy("llama", set(), temperature=1.0, seed=s) for s in (1, 1, 2))
    assert one == again != other


def stream(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    text = TextStream(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            return pieces, text
    return [*pieces, text.flush()], text


def tokens_of(text: str) -> list[int]:
    ids: list[int] = bundled_tokenizer()(text, add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    return ids


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}"), max_size=30)
ODD = st.text(st.sampled_from("a b\n€é漢字🙂👨‍👩‍👧\u0301  .,'s"), max_size=30)


@given(TEXT | ODD)
def test_pieces_join_to_the_text(text: str) -> None:
    ids = tokens_of(text)
    assume(bundled_tokenizer().decode(ids) == text)  # the vocabulary lacks a few rare bytes
    pieces, _ = stream(bundled_tokenizer(), ids)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_split_over_tokens_comes_whole() -> None:
    ids = tokens_of("🦜")
    assert len(ids) > 1
    assert stream(bundled_tokenizer(), ids)[0] == [""] * (len(ids) - 1) + ["🦜", ""]
    assert "".join(stream(bundled_tokenizer(), tokens_of("a🦜")[:-1])[0]) == "a"


@given(st.lists(st.integers(0, 49151), max_size=12))
def test_any_tokens_give_text_that_can_be_encoded_and_loses_only_an_unfinished_end(ids: list[int]) -> None:
    tokenizer = bundled_tokenizer()
    said = "".join(stream(tokenizer, ids)[0])
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    said.encode()
    assert whole.startswith(said)
    assert said == whole or whole.endswith("\N{REPLACEMENT CHARACTER}")


def test_spaces_survive_a_tokenizer_whose_words_carry_them() -> None:
    words = "the cat sat on the mat"
    tokenizer = spaced_tokenizer(words)
    ids = tokenizer(words)["input_ids"]
    assert stream(tokenizer, ids)[0] == ["the", " cat", " sat", " on", " the", " mat", ""]


def cut(text: str, stops: tuple[str, ...]) -> str:
    """Read character by character until a stop string ends; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@given(st.text("ab\n🙂 ", max_size=24), st.lists(st.text("ab\n🙂 ", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_the_text_wherever_tokens_end(text: str, stops: list[str]) -> None:
    pieces, state = stream(bundled_tokenizer(), tokens_of(text), tuple(stops))
    assert "".join(pieces) == cut(text, tuple(stops))
    assert state.stopped == any(stop in text for stop in stops)


def test_what_might_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    ids = tokens_of("one\n") + tokens_of("two\n") + tokens_of("\nthree")
    text = TextStream(bundled_tokenizer(), ("\n\n",))
    said = ""
    for token in ids:
        said += text.push(token)
        assert not said.endswith("\n")
        if text.stopped:
            break
    assert (said, text.stopped) == ("one\ntwo", True)
