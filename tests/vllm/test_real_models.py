"""Bundled models: preempted, and behind what vLLM has cached, blending is as near full prefill as our own engine's.

All requests of a part are sent at once. The measure is the mean KL to full prefill along vLLM's own answers. Which tokens
a policy chooses depends on what is cached, so single prompts differ between the engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig
from blendserve.core import BlendReport, Prompt, TokenIds
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import ModelError
from blendserve.evaluate.datasets import load
from blendserve.models.forward import Row, run_rows
from blendserve.models.kv_cache import KVCache
from blendserve.models.sources import source_of
from tests.support.vllm import BLOCK, Own, Served, serving

MODELS = ["smollm2-135m", "gemma3-270m"]
REQUESTS, PASSAGES = 8, 4  # at once; in a prompt
NEW, TOP = 48, 20  # tokens of an answer; probabilities of each that vLLM tells
NEAR = 1.1  # times our own engine's KL
FULL, BLEND = BlendConfig(method="full"), BlendConfig(method="blend")


@dataclass
class RealWorld:
    """A model, questions over stored passages, and both engines."""

    own: Own
    prompts: list[TokenIds]  # twice REQUESTS
    served: Served

    def answers(self, prompts: Sequence[TokenIds], params: Any = None) -> list[Said]:
        """What vLLM says to these prompts, sent at once."""
        from vllm import SamplingParams

        extra = {} if params is None else {"kv_transfer_params": {"blendserve": params}}
        asked = SamplingParams(
            max_tokens=NEW, temperature=0, ignore_eos=True, logprobs=TOP, extra_args=extra, detokenize=False
        )
        given = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self.served.llm.generate(given, asked, use_tqdm=False)
        return [_said(ids, output) for ids, output in zip(prompts, outputs, strict=True)]

    def forced(self, said: Said, blend: BlendConfig, blender: Blender) -> tuple[Tensor, BlendReport]:
        """Log probabilities [NEW, V] of our own engine along an answer, which is kept for the next turn."""
        cache, n, prompt = KVCache(blender.model, len(said.ids) + NEW), len(said.ids), Prompt.plain(said.ids)
        done = blender.run(prompt, blend, cache)
        logits = run_rows(
            blender.model, [Row(cache, n + i, token) for i, token in enumerate(said.tokens[:-1])]
        )
        blender.keep(prompt, done.report, said.tokens[:-1], cache)
        return torch.cat([done.result.logits[None], logits]).log_softmax(-1), done.report

    def mean_kl(self, answers: Sequence[Said], first: Sequence[Said]) -> tuple[float, float]:
        """To full prefill, along answers behind their first turns, if any: of vLLM, and of our own engine."""
        ours, theirs = list[float](), list[float]()
        for n, said in enumerate(answers):
            blender = self.own.blender.for_scope(f"{n} of {said.ids}", learns=False)
            for before in first[n : n + 1]:
                self.forced(before, BLEND, blender)
            full, (blended, report) = self.forced(said, FULL, blender)[0], self.forced(said, BLEND, blender)
            assert report.tokens_reused > 0
            assert bool(report.tokens_kept) == bool(first)
            ours.append(_kl(full, blended, said.told))
            theirs.append(_kl(full, None, said.told))
        return float(torch.tensor(theirs).mean()), float(torch.tensor(ours).mean())


@dataclass
class Said:
    """An answer of vLLM."""

    ids: TokenIds  # the prompt
    tokens: TokenIds
    told: list[dict[int, float]]  # of each token: the likeliest tokens' log probabilities
    report: dict[str, Any]


def _said(ids: TokenIds, output: Any) -> Said:
    only = output.outputs[0]
    told = [{token: value.logprob for token, value in each.items()} for each in only.logprobs]
    report = (output.kv_transfer_params or {}).get("blendserve", {})
    return Said(ids, tuple(only.token_ids), told, report)


def _kl(full: Tensor, other: Tensor | None, told: Sequence[dict[int, float]]) -> float:
    """Mean KL over tokens, of vLLM's likeliest tokens and all others as one. other: None = vLLM's own."""
    total = 0.0
    for n, each in enumerate(told):
        at = list(each)
        p, q = full[n, at], torch.tensor(list(each.values())) if other is None else other[n, at]
        p, q = (torch.cat([x.exp(), (1 - x.exp().sum()).clamp_min(1e-9)[None]]) for x in (p, q))
        total += float((p * (p / q).log()).sum()) / len(told)
    return total


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWorld]:
    """Parameter: a model, and for which share of the requests there are blocks."""
    model, share = request.param
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    try:
        folder = Path(source_of(model))
    except ModelError as error:
        pytest.skip(str(error))
    store = tmp_path_factory.mktemp("real") / "kv"
    own = Own(folder, store)
    own.blender.prefixes.cap_bytes = 1 << 30
    builder = PromptBuilder(own.model.tokenizer, own.config.prompt)
    examples = load("generated", limit=2 * REQUESTS).examples
    made = [builder.build(example.question, example.contexts[:PASSAGES]) for example in examples]
    own.store_chunks(list({chunk.ids: None for prompt in made for chunk in prompt.chunks}))
    n_blocks = int(share * sum(-(-len(prompt.ids) // BLOCK) for prompt in made[:REQUESTS]))
    options: dict[str, Any] = {
        "max_logprobs": TOP,
        "num_gpu_blocks_override": n_blocks,
        "disable_log_stats": False,
    }
    with serving(folder, store, **options) as served:
        yield RealWorld(own, [prompt.ids for prompt in made], served)


def preemptions(served: Served) -> float:
    counted = {metric.name: metric.value for metric in served.llm.get_metrics() if hasattr(metric, "value")}
    return float(counted["vllm:num_preemptions"])


def check(world: RealWorld, what: str, answers: Sequence[Said], first: Sequence[Said] = ()) -> None:
    assert all("error" not in said.report and said.report["tokens_approximate"] > 0 for said in answers)
    theirs, ours = world.mean_kl(answers, first)
    print(
        f"\n{what}: KL to full prefill {theirs:.4f} by vLLM, {ours:.4f} by our engine, {len(answers)} prompts"
    )
    assert 0 < theirs <= NEAR * ours


SHORT = pytest.mark.parametrize("real", [(model, 0.5) for model in MODELS], indirect=True, ids=MODELS)
ENOUGH = pytest.mark.parametrize("real", [(model, 3.0) for model in MODELS], indirect=True, ids=MODELS)


@SHORT
def test_many_at_once_some_preempted(real: RealWorld) -> None:
    before = preemptions(real.served)
    answers = real.answers(real.prompts[:REQUESTS])
    assert preemptions(real.served) > before
    check(real, "preempted", answers)


@ENOUGH
def test_behind_a_system_prompt(real: RealWorld) -> None:
    """Exact blocks of a beginning that all prompts share are cached."""
    beginning = real.prompts[-1][: 4 * BLOCK]
    real.answers([(*beginning, *real.prompts[0])], "exact")
    answers = real.answers([(*beginning, *ids) for ids in real.prompts[:REQUESTS]])
    check(real, "behind a system prompt", answers)


@ENOUGH
def test_second_turns_of_conversations(real: RealWorld) -> None:
    """Each behind its first turn, whose blended blocks are cached, and its answer."""
    first, others = real.answers(real.prompts[:REQUESTS]), real.prompts[REQUESTS:]
    turns = [(*said.ids, *said.tokens, *more) for said, more in zip(first, others, strict=True)]
    answers = real.answers(turns)
    for said, before in zip(answers, first, strict=True):
        assert said.report["tokens_matched"] <= len(said.ids) - len(before.ids) // BLOCK * BLOCK
    check(real, "second turns", answers, first)
