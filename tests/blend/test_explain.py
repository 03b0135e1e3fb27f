"""Token by token and part by part, an explanation says what the report sums up."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blended, Blender
from blendserve.config import BlendConfig
from blendserve.core import Explanation
from blendserve.store import LMDBStore, MemoryStore
from tests.store.helpers import CAP, flip
from tests.support.blending import some_ids, some_prompt
from tests.support.models import tiny_adapter

PREFIX = some_ids(5)
PROMPT = some_prompt([14, 9, 0, 20, 1, 9])
STORED = (0, 3, 5)
METHODS = ("full", "prefix", "reuse", "blend")


def blender(store: Any) -> Blender:
    return Blender(tiny_adapter("llama"), "fingerprint", store, PREFIX, PREFIX)


def blended(stored: tuple[int, ...] = STORED, **options: Any) -> Blended:
    made = blender(MemoryStore(CAP))
    if stored:
        made.precompute([PROMPT.chunks[i].ids for i in stored])
    return made.run(PROMPT, BlendConfig(**{"method": "blend", "ratio": 0.4, **options}))


def states(explanation: Explanation) -> list[str]:
    return [state for state, n in explanation.runs for _ in range(n)]


@pytest.mark.parametrize("correction", ["ridge", "none"])
@pytest.mark.parametrize("stored", [(), (0,), STORED, (1, 3), (0, 1, 3, 4, 5)])
@pytest.mark.parametrize("method", METHODS)
def test_states_add_up_to_the_report(method: str, stored: tuple[int, ...], correction: str) -> None:
    done = blended(stored, method=method, correction=correction)
    report, found = done.report, Counter(states(done.explanation))
    corrected = correction == "ridge" and method == "blend"
    assert found["corrected" if corrected else "reused"] == report.tokens_reused
    assert found["reused" if corrected else "corrected"] == 0
    assert found["exact"] == report.tokens_exact
    assert found["recomputed"] == report.tokens_recomputed
    assert found["fresh"] == report.tokens_computed + report.tokens_suffix
    assert sum(found.values()) == len(PROMPT)


@pytest.mark.parametrize("method", METHODS)
def test_parts_cover_the_prompt_in_order_and_name_their_passages(method: str) -> None:
    parts = blended(method=method).explanation.parts
    assert [part.kind for part in parts] == ["prefix", *["passage"] * 5, "suffix"]
    assert [part.passage for part in parts[1:-1]] == [0, 1, 3, 4, 5]  # but for the one without tokens
    assert parts[0].span.start == 0
    assert parts[-1].span.stop == len(PROMPT)
    assert all(a.span.stop == b.span.start for a, b in pairwise(parts))
    assert all(part.span == PROMPT.spans[part.passage] for part in parts if part.passage is not None)
    assert all(part.reason.endswith(".") for part in parts)


def test_each_part_says_why() -> None:
    reasons = {
        method: {
            part.passage: part.reason
            for part in blended(method=method).explanation.parts
            if part.kind == "passage"
        }
        for method in METHODS
    }
    assert "right behind the prefix" in reasons["blend"][0]
    assert "moved to its place" in reasons["blend"][3]
    assert reasons["blend"][1] == "It was not in the store."
    assert all("'full' reuses nothing" in reason for reason in reasons["full"].values())
    assert "right behind" in reasons["prefix"][0]
    assert "'prefix' reuses nothing of it" in reasons["prefix"][3]


def test_tiers_stand_where_kv_was_used() -> None:
    explanation = blended().explanation
    used = {part.span.start for part in explanation.parts if part.tier}
    assert used == {0, *(PROMPT.spans[i].start for i in STORED)}
    all_states = states(explanation)
    for part in explanation.parts:
        fresh = {"fresh"} == set(all_states[part.span.start : part.span.stop])
        assert fresh == (part.tier == "")


@pytest.mark.parametrize("policy", ["query", "deviation"])
def test_the_tokens_recomputed_are_those_with_the_highest_scores(policy: str) -> None:
    done = blended(policy=policy, check_layers=(1,))
    scores, all_states = done.explanation.scores, states(done.explanation)
    assert scores is not None
    chosen = {i for i, state in enumerate(all_states) if state == "recomputed"}
    candidates = {i for i, state in enumerate(all_states) if state in ("recomputed", "corrected")}
    assert {i for i in range(len(PROMPT)) if not torch.isnan(scores[i])} == candidates
    assert len(candidates) > len(chosen) > 0
    assert min(scores[i] for i in chosen) >= max(scores[i] for i in candidates - chosen)


def test_policies_that_score_nothing_give_no_scores() -> None:
    assert blended(policy="random").explanation.scores is None
    assert blended(method="full").explanation.scores is None


def test_a_damaged_chunk_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    with LMDBStore(tmp_path, CAP) as store:
        made = blender(store)
        made.precompute([chunk.ids for chunk in PROMPT.chunks])
        key = made.key(PROMPT.chunks[3].ids)
        with store._env.writing(1.0) as txn:
            flip(b"h" + key, 20)(txn)
        done = made.run(PROMPT, BlendConfig(method="blend"))
    part = next(part for part in done.explanation.parts if part.passage == 3)
    assert done.report.chunks_corrupt == 1
    assert part.reason.startswith("Its stored KV was of no use: ")
    assert set(states(done.explanation)[part.span.start : part.span.stop]) == {"fresh"}
