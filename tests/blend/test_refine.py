"""Refining: against the model's own forward, against decoding steps at the same positions, and when there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.selection import top
from blendserve.config import BlendConfig
from blendserve.core import run
from blendserve.errors import ConfigError
from blendserve.models.forward import Row, run_rows
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.registry import POLICIES
from tests.support.blending import (
    assert_near,
    check_report,
    distance,
    model_kv,
    some_priors,
    some_prompt,
    tiny_blender,
)
from tests.support.models import BLEND_KINDS, tiny_decoder

PROMPT = some_prompt([14, 9, 20, 12])
N, N_SUFFIX = len(PROMPT), len(PROMPT.suffix)
CHUNKS = [chunk.ids for chunk in PROMPT.chunks]
N_STORED = sum(map(len, CHUNKS))
BLEND = BlendConfig(method="blend", ratio=0.1, refine=0.4)


def blender(kind: str = "llama", n_stored: int = len(CHUNKS)) -> Blender:
    """Over a store with the first chunks of the prompt, and priors."""
    decoder = tiny_decoder(kind)
    made = tiny_blender(None, *CHUNKS[:n_stored], decoder=decoder)
    made.priors.use(some_priors(decoder, 0.3))
    return made


def refined(decoder: DecoderModel, done: Prefilled) -> Prefilled:
    return run(done.refine(decoder, PROMPT.ids))


def copy_of(decoder: DecoderModel, cache: KVCache) -> KVCache:
    other = KVCache(decoder, cache.capacity)
    for l in range(decoder.n_kv_layers):
        other.write(l, slice(None), cache.keys[l], cache.values[l])
    return other


@pytest.mark.parametrize("kind", BLEND_KINDS)
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5])
def test_refined_as_a_whole_a_prompt_has_full_prefills_kv(kind: str, ratio: float) -> None:
    maker = blender(kind)
    done = maker.run(PROMPT, BLEND.with_values(ratio=ratio, refine=1.0))
    keys, values = model_kv(maker.model, PROMPT.ids)
    assert distance(done.result.cache.keys, keys) > 1e-2
    report = refined(maker.model, done).report
    assert_near(done.result.cache.keys, keys)
    assert_near(done.result.cache.values, values)
    check_report(report, PROMPT)
    assert report.tokens_refined == report.tokens_reused == done.report.tokens_reused > 0


@pytest.mark.parametrize("n_stored", [3, 4])
@pytest.mark.parametrize("kind", BLEND_KINDS)
def test_rows_are_the_best_and_are_run_as_decoding_steps_would(kind: str, n_stored: int) -> None:
    """Also around a chunk that was missing, whose rows stay."""
    maker = blender(kind, n_stored)
    decoder, done = maker.model, maker.run(PROMPT, BLEND)
    scores, rows = done.report.scores, done.to_refine
    assert scores is not None
    n_found = sum(map(len, CHUNKS[:n_stored]))
    best = top(scores.nan_to_num(-1.0), round(0.4 * n_found))
    assert rows.tolist() == [*best.tolist(), *range(N - N_SUFFIX, N)]
    twin = copy_of(decoder, done.result.cache)
    run_rows(decoder, [Row(twin, at, PROMPT.ids[at]) for at in rows.tolist()])
    after = refined(decoder, done)
    assert_near(done.result.cache.keys, twin.keys)
    assert_near(done.result.cache.values, twin.values)
    assert after.report.tokens_refined == round(0.4 * n_found) - round(0.1 * n_found)
    assert after.report.cost == pytest.approx(done.report.cost + len(rows) / N)
    assert len(after.to_refine) == 0


@pytest.mark.parametrize(
    "options",
    [
        *({"method": method} for method in ("full", "prefix", "reuse")),
        {"refine": 0.0},
        {"refine": 0.1},
        {"ratio": 1.0},
    ],
)
def test_nothing_is_refined_where_nothing_is_reused_or_no_more_is_asked_for(options: dict[str, Any]) -> None:
    done = blender().run(PROMPT, BLEND.with_values(**options))
    assert len(done.to_refine) == 0


def test_nothing_is_refined_where_nothing_is_stored() -> None:
    assert len(blender(n_stored=0).run(PROMPT, BLEND).to_refine) == 0


def test_the_first_token_is_that_of_the_ratio_alone() -> None:
    one, other = (blender().run(PROMPT, BLEND.with_values(refine=share)).result for share in (0.0, 0.4))
    assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("policy", sorted(set(POLICIES.names) - {"query"}))
def test_policies_without_scores_are_refused_by_name(policy: str) -> None:
    with pytest.raises(ConfigError) as error:
        blender().run(PROMPT, BLEND.with_values(policy=policy))
    assert error.value.setting == "blend.refine"
