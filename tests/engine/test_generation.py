"""Tokens against transformers' own generate and the nucleus formula; text against decoding everything at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.prefill import PrefillPlan, blend_prefill
from blendserve.config import BlendConfig, DecodeConfig
from blendserve.core import Prompt, run
from blendserve.engine.generate import Detokenizer, generate
from blendserve.engine.request import AnswerRules
from blendserve.engine.sampler import Sampler, likeliest, nucleus_of, top
from blendserve.models.kv_cache import KVCache
from blendserve.models.runner import DecodeRunner
from tests.support.blending import lay, some_prompt
from tests.support.engines import PASSAGES, QUESTIONS, toy_engine
from tests.support.models import tiny_decoder
from tests.support.tokenizers import bundled_tokenizer, spaced_tokenizer

PROMPT, NEW = some_prompt([9, 14]), 24


def tokens(end: set[int], **options: Any) -> list[int]:
    decoder, config = tiny_decoder("llama"), DecodeConfig(max_new_tokens=NEW, **options)
    cache = KVCache(decoder, len(PROMPT) + NEW)
    plan = PrefillPlan.of(lay(decoder, PROMPT), BlendConfig(policy="all"))
    done = run(blend_prefill(decoder, plan, cache))
    return list(generate(decoder, done.cache, len(PROMPT), done.logits, config, end))


def test_greedy_equals_transformers_generate_up_to_an_end_token() -> None:
    model: Any = tiny_decoder("llama").reference
    prompt = torch.tensor([PROMPT.ids])
    mask = torch.ones_like(prompt)
    own = model.generate(prompt, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    free = own[0, prompt.shape[1] :].tolist()
    assert tokens(set()) == free
    assert tokens({free[10]}) == free[: free.index(free[10])]
    assert tokens({free[0]}) == []


@pytest.mark.parametrize("refine", [0.0, 0.5, 1.0])
def test_the_first_token_is_the_blended_prompts_and_the_others_follow_refined_kv(refine: float) -> None:
    """Refined as a whole: the model's own tokens after that first one."""
    engine = toy_engine(blend={"ratio": 0.05, "correction": "none"})
    engine.precompute(PASSAGES)
    prompt = engine.prompts.build(QUESTIONS[0], PASSAGES)
    answer = engine.answer(QUESTIONS[0], PASSAGES, refine=refine)
    blend = engine.config.blend.with_values(refine=refine)
    done, decoder = (
        engine.blender.run(prompt, blend, KVCache(engine.model.decoder, 1024)),
        engine.model.decoder,
    )
    first = int(done.result.logits.argmax())
    if refine:
        run(done.refine(decoder, prompt.ids))
    runner, tokens = DecodeRunner.over(decoder, done.result.cache, len(prompt), NEW), [first]
    for at in range(len(prompt), len(prompt) + len(answer.token_ids) - 1):
        tokens.append(int(runner.step(at, tokens[-1:])[0].argmax()))
    assert answer.token_ids == tuple(tokens)
    assert (answer.report.tokens_refined > 0) == (answer.timings.refine > 0) == (refine > 0)
    if refine == 1.0:
        model: Any = decoder.reference
        own = model.generate(
            torch.tensor([[*prompt.ids, first]]), max_new_tokens=len(tokens) - 1, do_sample=False
        )
        assert own[0, len(prompt) :].tolist() == tokens


def test_an_answer_of_one_token_is_not_refined() -> None:
    engine = toy_engine(blend={"refine": 1.0})
    engine.precompute(PASSAGES)
    answer = engine.answer(QUESTIONS[0], PASSAGES, max_new_tokens=1)
    assert (answer.report.tokens_refined, answer.timings.refine) == (0, 0.0)
    assert answer.report.tokens_reused > 0


def nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> dict[int, float]:
    """One token at a time: the smallest set of most likely tokens that reaches top_p."""
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
    sampler, n = Sampler(DecodeConfig(temperature=temperature, top_p=top_p, seed=1)), 2000
    drawn = Counter(sampler(logits) for _ in range(n))
    expected = nucleus(logits, temperature, top_p)
    assert set(drawn) == set(expected)
    for token, share in expected.items():
        sigma = (n * share * (1 - share)) ** 0.5
        assert abs(drawn[token] - n * share) <= 4.5 * sigma


@pytest.mark.parametrize("n", [1, 40, 64, 1_000, 4_096, 49_152, 151_669])
@pytest.mark.parametrize("allowed", [1.0, 0.001])
def test_the_largest_values_are_those_of_the_sorted_vocabulary(n: int, allowed: float) -> None:
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator).bfloat16().float()  # several are equal
    values[torch.rand(n, generator=generator) > allowed] = -torch.inf
    for k in {min(k, n) for k in (1, 5, 20, 256)}:
        found, ids = top(values, k)
        assert torch.equal(found, values.sort(descending=True).values[:k])
        assert torch.equal(values[ids], found)
        assert len(set(ids.tolist())) == k
    for dtype in (torch.float32, torch.bfloat16):
        assert likeliest(values.to(dtype)) == values.tolist().index(float(values.max()))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])
def test_a_nucleus_is_that_of_the_sorted_vocabulary(spread: float, top_p: float) -> None:
    """From one token up to nearly all of them."""
    logits = spread * torch.randn(20_001, generator=torch.Generator().manual_seed(1))
    probabilities = torch.softmax(logits, dim=-1)
    ranked, order = probabilities.sort(descending=True)
    n = max(1, int((ranked.double().cumsum(0) - ranked < top_p).sum()))
    found, ids = nucleus_of(probabilities, top_p)
    assert torch.equal(found.sort(descending=True).values, ranked[:n])
    assert torch.equal(probabilities[ids], found)
    assert set(ids.tolist()) == set(order[:n].tolist())


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1e-320, 1.0), (1e-7, 0.5), (1.0, 5e-324), (100.0, 1e-45)]
)
def test_settings_that_no_float_can_hold_are_greedy(temperature: float, top_p: float) -> None:
    logits = torch.linspace(-50.0, 50.0, 300)[torch.randperm(300)]
    chosen = Sampler(DecodeConfig(temperature=temperature, top_p=top_p))(logits)
    assert chosen == int(logits.argmax())


def plain_rules(
    logits: torch.Tensor, config: DecodeConfig, rules: AnswerRules, prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """The distribution of the next token [V], by masks over the sorted vocabulary."""
    x = logits.double().clone()
    for token in {*prompt, *answer}:
        x[token] = (
            x[token] / rules.repetition_penalty if x[token] > 0 else x[token] * rules.repetition_penalty
        )
    for token in set(answer):
        x[token] -= rules.frequency_penalty * answer.count(token) + rules.presence_penalty
    p = torch.softmax(x / config.temperature, 0)
    p[p < rules.min_p * p.max()] = 0
    if rules.top_k:
        p[p < p.sort(descending=True).values[min(rules.top_k, len(p)) - 1]] = 0
    ranked, order = (p / p.sum()).sort(descending=True)
    p[order[ranked.cumsum(0) - ranked >= config.top_p]] = 0
    return p / p.sum()


RULES = [
    (AnswerRules(top_k=3), 1.0),
    (AnswerRules(top_k=100), 1.0),
    (AnswerRules(min_p=0.3), 1.0),
    (AnswerRules(top_k=4, min_p=0.05), 0.7),
    (AnswerRules(presence_penalty=1.5, frequency_penalty=0.5), 1.0),
    (AnswerRules(repetition_penalty=2.0, top_k=5), 1.0),
    (AnswerRules(frequency_penalty=-1.0, min_p=0.1), 0.8),
]


@pytest.mark.parametrize(("rules", "top_p"), RULES, ids=str)
def test_sampling_rules_are_those_of_masks_over_a_sorted_vocabulary(rules: AnswerRules, top_p: float) -> None:
    """A vocabulary of seven tokens; the third token of an answer, whose first two are given."""
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0, 1.4, -3.0])
    prompt, n, drawn = [3, 6], 1500, Counter[int]()
    configs = [DecodeConfig(temperature=0.9, seed=seed, top_p=top_p) for seed in range(n)]
    for config in configs:
        sampler = Sampler(config, rules, Prompt((), (), tuple(prompt)))
        for said in (5, 5):
            forced = torch.full((7,), -1e4)
            forced[said] = 1e4
            assert sampler(forced) == said
        drawn[sampler(logits)] += 1
    expected = plain_rules(logits, configs[0], rules, prompt, [5, 5])
    assert set(drawn) <= set(expected.nonzero()[:, 0].tolist())
    for token, share in enumerate(expected.tolist()):
        assert abs(drawn[token] - n * share) <= 4.5 * (n * share * (1 - share)) ** 0.5 + 1e-6


def stream(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The pieces, and whether a stop string ended them."""
    text = Detokenizer(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stop_sequence is not None:
            return pieces, True
    return [*pieces, text.flush()], False


def tokens_of(text: str) -> list[int]:
    options: Any = {"add_special_tokens": False, "split_special_tokens": True}
    ids: list[int] = bundled_tokenizer()(text, **options)["input_ids"]
    return ids


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}"), max_size=30)
ODD = st.text(st.sampled_from("a b\n€é漢字🙂👨‍👩‍👧\u0301  .,'s"), max_size=30)


@given(st.lists(st.integers(0, 49151), max_size=12) | (TEXT | ODD).map(tokens_of))
def test_any_tokens_give_their_text_whose_unfinished_end_alone_is_lost(ids: list[int]) -> None:
    tokenizer = bundled_tokenizer()
    text = "".join(stream(tokenizer, ids)[0])
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    text.encode()
    assert whole.startswith(text)
    assert text == whole or whole.endswith("\N{REPLACEMENT CHARACTER}")


def test_spaces_survive_a_tokenizer_whose_words_carry_them() -> None:
    words = "the cat sat on the mat"
    tokenizer = spaced_tokenizer(words)
    assert stream(tokenizer, tokenizer(words)["input_ids"])[0] == [
        *("the", " cat", " sat", " on", " the", " mat", "")
    ]


def cut(text: str, stops: tuple[str, ...]) -> str:
    """Read character by character until a stop string ends; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@given(st.text("ab\n🙂 ", max_size=24), st.lists(st.text("ab\n🙂 ", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_the_text_wherever_tokens_end(text: str, stops: list[str]) -> None:
    """A piece that goes out too early, before a stop string is complete, would be part of the text."""
    pieces, stopped = stream(bundled_tokenizer(), tokens_of(text), tuple(stops))
    assert "".join(pieces) == cut(text, tuple(stops))
    assert stopped == any(stop in text for stop in stops)


def test_text_that_may_begin_a_stop_string_is_held_back_no_longer_than_needed() -> None:
    ids = [*tokens_of("one\n"), *tokens_of("two\n"), *tokens_of("\nthree")]
    pieces, stopped = stream(bundled_tokenizer(), ids, ("\n\n",))
    assert stopped
    assert [piece for piece in pieces if piece] == ["one", "\ntwo"]


def test_an_answer_has_the_likeliest_tokens_of_each_place() -> None:
    with toy_engine(blend={"method": "full"}) as engine:
        answer = engine.answer(QUESTIONS[0], PASSAGES[:2], max_new_tokens=3, logprobs=5)
        ids = [*engine.prompts.build(QUESTIONS[0], PASSAGES[:2]).ids, *answer.token_ids]
        model: Any = engine.model.decoder.reference
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        assert engine.answer(QUESTIONS[0], PASSAGES[:2], max_new_tokens=1).logprobs == ()
    assert len(answer.logprobs) == len(answer.token_ids) == 3
    for at, found in enumerate(answer.logprobs, len(ids) - 4):
        likeliest = logits[at].topk(5)
        assert [token for token, _ in found.top] == likeliest.indices.tolist()
        assert torch.allclose(torch.tensor([p for _, p in found.top]), likeliest.values, atol=1e-3)
