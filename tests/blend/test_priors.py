"""Priors: what is learnt is what is there, what a store keeps comes back, and what cannot be used is as none."""

from __future__ import annotations

import pytest
import torch

from blendserve.blend import priors
from blendserve.blend.blender import Blender
from blendserve.blend.priors import NAME, Known, Priors, fit_priors, prompts_of
from blendserve.config import BlendConfig
from blendserve.core import TokenIds
from blendserve.errors import StoreUnavailable
from blendserve.models.adapter import Adapter
from blendserve.store.memory import MemoryStore
from tests.support.blending import assert_near, distance, model_kv, some_ids, some_prompt
from tests.support.models import tiny_adapter

CORPUS = [some_ids(60, seed) for seed in range(60)]
PREFIX = some_ids(5, 999)


def learnt(adapter: Adapter, context: TokenIds = PREFIX) -> Priors:
    found = fit_priors(adapter, PREFIX, context, CORPUS)
    assert found is not None
    return found


def test_what_is_learnt_is_least_squares_over_the_models_own_kv() -> None:
    """By the borrowed model's own forward, and rows added for the penalty; of one head of the last layer."""
    adapter, l, head = tiny_adapter("llama"), tiny_adapter("llama").n_layers - 1, 1
    xs, ys, places = [], [], []
    for prompt in prompts_of(CORPUS, PREFIX, adapter.context_limit):
        keys, values = model_kv(adapter, prompt.ids)
        rope = adapter.rope(torch.arange(len(prompt)))[l]
        whole = torch.cat([adapter.rotate(keys[l], rope.inverse), values[l]], dim=-1)[head]
        for chunk, span in list(zip(prompt.chunks, prompt.spans, strict=True))[1:]:  # the first is exact
            at, n = len(PREFIX), len(PREFIX) + len(chunk)
            keys, values = model_kv(adapter, (*PREFIX, *chunk.ids))
            turned = adapter.rotate(keys[l], adapter.rope(torch.arange(n))[l].inverse)
            alone = torch.cat([turned, values[l]], dim=-1)[head, at:]
            xs.append(alone)
            ys.append(whole[span.start : span.stop] - alone)
            places.append(
                torch.full((len(span), 1), span.start / span.stop)
            )  # of all text up to its end, what is not it
    x, y, by = (torch.cat(parts).double() for parts in (xs, ys, places))
    dim, total = adapter.head_dim, (by**2).sum()
    spread = ((by * (x - (by**2 * x).sum(0) / total)) ** 2).sum(0) / total
    size = torch.cat([part.mean().sqrt().expand(dim) for part in spread.chunk(2)])
    added = torch.cat([priors.PENALTY**0.5 * torch.diag(size), torch.zeros(2 * dim, 1)], dim=1)
    rows = torch.cat([by * torch.cat([x, torch.ones(len(x), 1)], dim=1), added])
    wanted = torch.linalg.lstsq(rows, torch.cat([y, torch.zeros(2 * dim, 2 * dim)])).solution
    weights, constant = learnt(adapter).layer(l)
    assert_near(weights[head].double(), wanted[:-1], 1e-3)
    assert_near(constant[head].double(), wanted[-1], 1e-3)


def test_every_chunk_stands_in_one_prompt_and_none_is_too_long() -> None:
    found = prompts_of([*CORPUS, (), some_ids(900, 1)], PREFIX, 500)
    assert all(len(prompt) <= 500 and len(prompt.chunks) > 1 for prompt in found)
    stood = [chunk.ids for prompt in found for chunk in prompt.chunks]
    assert len(stood) == len(set(stood))
    assert set(stood) <= set(CORPUS)
    assert len(stood) >= len(CORPUS) - 1  # one may be left over, alone
    assert prompts_of(CORPUS, PREFIX, 500) == prompts_of(CORPUS, PREFIX, 500)


def test_too_little_text_teaches_nothing() -> None:
    assert fit_priors(tiny_adapter("llama"), PREFIX, PREFIX, CORPUS[:3]) is None


def test_learnt_once_and_found_by_the_next_engine() -> None:
    adapter, store = tiny_adapter("llama"), MemoryStore(1 << 30)
    calls = []
    first = Known(adapter, "reader", store, PREFIX, PREFIX)
    assert first.current() is None
    assert first.learn(CORPUS, lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    for _ in range(2):
        assert first.learn(CORPUS, lambda done, total: pytest.fail("learnt twice"))
    there = Known(adapter, "reader", store, PREFIX, PREFIX).current()
    assert there is not None
    for mine, found in zip(learnt(adapter).layer(1), there.layer(1), strict=True):
        assert distance(mine, found) < 2**-7 * float(mine.abs().max())  # weights are kept as bf16


@pytest.mark.parametrize(
    ("fingerprint", "context"), [("another", PREFIX), ("reader", (*PREFIX, 7))], ids=["reader", "context"]
)
def test_anothers_are_not_used(fingerprint: str, context: TokenIds) -> None:
    adapter, store = tiny_adapter("llama"), MemoryStore(1 << 30)
    Known(adapter, "reader", store, PREFIX, PREFIX).learn(CORPUS)
    assert Known(adapter, fingerprint, store, PREFIX, context).current() is None


@pytest.mark.parametrize("raw", [b"", b"no safetensors", b"\xff" * 64])
def test_what_is_none_is_as_if_it_were_not_there(raw: bytes) -> None:
    adapter, store = tiny_adapter("llama"), MemoryStore(1 << 30)
    Known(adapter, "reader", store, PREFIX, PREFIX).learn(CORPUS)
    (info,) = store.all_tables()
    store.put_tables(NAME, info.fingerprint, raw)
    assert Known(adapter, "reader", store, PREFIX, PREFIX).current() is None


def test_a_prior_of_another_shape_is_refused() -> None:
    made = learnt(tiny_adapter("llama"))
    with pytest.raises(ValueError, match="another shape"):
        Priors.from_bytes(
            Priors(made.layer(1).weights[None, :1], made.layer(1).constant[None, :1]).to_bytes(),
            tiny_adapter("llama"),
        )


def test_the_report_says_whether_it_was_used_and_without_it_prior_is_ridge() -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([30, 30, 30])
    found = {}
    for correction in ("prior", "ridge"):
        store = MemoryStore(1 << 30)
        blender = Blender(adapter, "reader", store, prompt.prefix, prompt.prefix)
        blender.precompute([chunk.ids for chunk in prompt.chunks])
        blend = BlendConfig(method="blend", correction=correction, ratio=0.2)
        found[correction] = blender.run(prompt, blend)
        if correction == "prior":
            blender.known.learn([some_ids(60, seed) for seed in range(60)])
            found["learnt"] = blender.run(prompt, blend)
            found["reuse"] = blender.run(prompt, without_recomputing(blend))
    assert torch.equal(found["prior"].prefilled.logits, found["ridge"].prefilled.logits)
    assert not torch.equal(found["prior"].prefilled.logits, found["learnt"].prefilled.logits)
    assert [found[name].report.prior for name in ("prior", "ridge", "learnt", "reuse")] == [
        False,
        False,
        True,
        True,
    ]


def without_recomputing(blend: BlendConfig) -> BlendConfig:
    """With nothing recomputed: what is expected is all there is."""
    return blend.model_copy(update={"policy": "none", "ratio": 0.0})


def test_a_store_out_of_reach_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, store = tiny_adapter("llama"), MemoryStore(1 << 30)
    Known(adapter, "reader", store, PREFIX, PREFIX).learn(CORPUS)
    there = Known(adapter, "reader", store, PREFIX, PREFIX)

    def gone(*_: object) -> bytes:
        raise StoreUnavailable("nobody answers")

    with monkeypatch.context() as cut:
        cut.setattr(store, "tables", gone)
        assert there.current() is None
    assert there.current() is not None
