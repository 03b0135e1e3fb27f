"""Models with recurrent layers: what is exact, what a chunk's state map is for, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Cache

from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.blend.layout import Layout
from blendserve.blend.policies import Policy, validate_blend
from blendserve.blend.prefix_cache import PrefixCache
from blendserve.config import BlendConfig
from blendserve.core import Prompt, run
from blendserve.errors import ConfigError, ModelUnsupported
from blendserve.kv import Layers
from blendserve.models import model as model_module
from blendserve.models import recurrent
from blendserve.models.forward import Row, run_rows
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.recurrent import RecurrentMixer
from blendserve.store import LMDBStore
from blendserve.store.view import decode
from tests.support.blending import (
    PREFIX,
    assert_near,
    check_report,
    model_kv,
    model_logits,
    model_says,
    some_ids,
    some_prompt,
    tiny_blender,
)
from tests.support.models import HYBRIDS, needs_recurrent, tiny_decoder, tiny_model
from tests.support.stores import ROOMY

REUSE = BlendConfig(method="blend", ratio=0.0, correction="none")
BOUND = 3e-5  # on logits of about 4


def assert_same_kv(ours: Layers, own: Layers) -> None:
    """To rounding, which grows with the numbers."""
    largest = max(float(x.abs().max()) for x in own if x.numel())
    assert_near(ours, own, BOUND * max(1.0, largest / 4))


def kl_to_full(name: str, n_prompts: int = 6) -> float:
    """Mean KL of the first token's distribution to full prefill's, over prompts of three stored chunks."""
    decoder, found = tiny_decoder(name), 0.0
    for seed in range(n_prompts):
        prompt = some_prompt([60, 50, 40], suffix=12, seed=seed)
        blender = tiny_blender(
            None, *(chunk.ids for chunk in prompt.chunks), decoder=decoder, prefix=prompt.prefix
        )
        ours = blender.run(prompt, REUSE).result.logits.log_softmax(-1)
        full = model_logits(decoder, prompt).log_softmax(-1)
        found += float((full.exp() * (full - ours)).sum()) / n_prompts
    return found


@pytest.mark.parametrize("name", HYBRIDS)
@given(
    lengths=st.lists(st.sampled_from([1, 5, 16, 17, 40]), min_size=1, max_size=4),
    stored=st.integers(0, 15),
    suffix=st.sampled_from([1, 9]),
)
@settings(max_examples=15)
def test_a_prompt_is_exact_if_its_tokens_run_or_stand_where_they_were_computed(
    name: str, lengths: list[int], stored: int, suffix: int
) -> None:
    decoder, prompt = tiny_decoder(name), some_prompt(lengths, suffix=suffix)
    chunks = [chunk.ids for chunk in prompt.chunks]
    exact = model_logits(decoder, prompt)
    some = tiny_blender(None, *(ids for i, ids in enumerate(chunks) if stored >> i & 1), decoder=decoder)
    all_run = some.run(prompt, REUSE.with_values(ratio=1.0))
    in_front = tiny_blender(None, chunks[0], decoder=decoder).run(prompt, REUSE)
    only_prefix = some.run(prompt, REUSE.with_values(method="prefix"))
    for done in (all_run, in_front, only_prefix):
        assert_near(done.result.logits, exact, BOUND)
        check_report(done.report, prompt)
        kept = done.result.cache.beginning(decoder, len(prompt))
        for ours, own in zip((kept.keys, kept.values), model_kv(decoder, prompt.ids), strict=True):
            assert_same_kv(ours, own)
    assert all_run.report.tokens_reused == 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_reused_chunks_run_their_first_tokens_alone_and_answers_go_on_from_the_state(name: str) -> None:
    decoder, prompt = tiny_decoder(name), some_prompt([60, 50, 10], suffix=7)
    blender = tiny_blender(None, *(chunk.ids for chunk in prompt.chunks), decoder=decoder)
    cache = KVCache(decoder, len(prompt) + 20)
    done = blender.run(prompt, REUSE, cache)
    report = done.report
    check_report(report, prompt)
    # The third chunk is no longer than a seam.
    assert (report.tokens_computed, report.tokens_reused) == (2 * decoder.seam + 10, 50 - decoder.seam)
    assert report.tokens_first == 60 - decoder.seam
    following, n = some_ids(9), len(prompt)
    together = run_rows(decoder, [Row(cache, n + i, token) for i, token in enumerate(following)])
    one_by_one = [run_rows(decoder, [Row(cache, n + i, token)]) for i, token in enumerate(following)]
    assert_near(torch.cat(one_by_one), together, BOUND)  # from the prefill's state, which is kept
    with pytest.raises(KeyError):
        run_rows(decoder, [Row(cache, n + 3, 5)])


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_state_behind_a_prompt_is_that_of_transformers_own_cache(name: str) -> None:
    decoder, prompt = tiny_decoder(name), some_prompt([40, 30], suffix=7)
    chunks = [chunk.ids for chunk in prompt.chunks]
    own = model_says(decoder, prompt.ids).past_key_values
    for stored in ([], chunks[:1]):  # nothing, and the chunk right behind the prefix
        done = tiny_blender(None, *stored, decoder=decoder).run(prompt, REUSE)
        for l in (l for l in decoder.recurrent if decoder.mixer(l).has_state):
            state, layer = done.result.cache.state(l, len(prompt)), own.layers[decoder.own_layer(l)]
            n_inputs = state.inputs.shape[-1]
            assert_near(state.inputs, layer.conv_states[0][0][..., -n_inputs:], BOUND)
            if state.memory.numel():
                assert_near(state.memory, layer.recurrent_states[0][0], BOUND)


@needs_recurrent
def test_decoding_several_requests_at_once_keeps_their_states_apart() -> None:
    decoder, caches = tiny_decoder(HYBRIDS[0]), []
    prompts = [some_prompt([40], seed=seed) for seed in range(3)]
    for prompt in prompts:
        caches.append(KVCache(decoder, len(prompt) + 5))
        tiny_blender(decoder=decoder, prefix=prompt.prefix).run(prompt, REUSE, caches[-1])
    tokens = some_ids(3)
    both = run_rows(decoder, [Row(c, len(p), t) for c, p, t in zip(caches, prompts, tokens, strict=True)])
    for logits, prompt, token in zip(both, prompts, tokens, strict=True):
        longer = Prompt(prompt.prefix, prompt.chunks, (*prompt.suffix, token))
        assert_near(logits, model_logits(decoder, longer), BOUND)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prefix_that_is_cached_whole_is_continued_and_another_computed(name: str) -> None:
    decoder = tiny_decoder(name)
    kept = PrefixCache(ChunkComputer(decoder, PREFIX), ROOMY)
    first = (*PREFIX, *some_ids(30, 2))
    longer, other = (*first, *some_ids(20, 3)), (*first[:-3], *some_ids(20, 4))
    assert run(kept.get("a", first)).reused == len(PREFIX)
    for ids, reused in ((longer, len(first)), (other, len(PREFIX)), (some_ids(12, 9), 0)):
        found = run(kept.get("a", ids))
        assert found.reused == reused
        for ours, own in zip((found.kv.keys, found.kv.values), model_kv(decoder, ids), strict=True):
            attention = [l for l in range(decoder.n_layers) if l not in decoder.recurrent]
            assert_same_kv(*(tuple(side[l] for l in attention) for side in (ours, own)))
        prompt = Prompt(ids, (), some_ids(5))
        done = tiny_blender(decoder=decoder, prefix=PREFIX).run(prompt, REUSE, prefix_kv=None)
        assert_near(done.result.logits, model_logits(decoder, prompt), BOUND)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_stored_state_map_is_the_computed_one_to_the_bit(name: str, tmp_path: Path) -> None:
    decoder, ids = tiny_decoder(name), some_ids(50)
    kv, store = ChunkComputer(decoder, PREFIX).compute([ids])[0], LMDBStore(tmp_path, ROOMY)
    blender = tiny_blender(store, ids, decoder=decoder)
    with store.snapshot() as stored:
        record = stored.get(blender.key(ids))
        assert record is not None
        back = decode(record.copy())
    store.close()
    assert (back.recurrent, back.n_tokens, back.ids) == (decoder.recurrent, 50, kv.ids)
    for a, b in zip((*kv.keys, *kv.values), (*back.keys, *back.values), strict=True):
        assert torch.equal(a, b)
    assert kv.n_bytes == decoder.chunk_bytes(50)


@needs_recurrent
def test_a_run_is_used_where_its_chunk_ends_in_the_prompt_and_begins_within_its_seam() -> None:
    decoder, chunk = tiny_decoder(HYBRIDS[0]), some_ids(60)
    blender = tiny_blender(None, chunk, decoder=decoder, prefix=())
    for cut, n_reused in (
        (slice(None), 60 - decoder.seam),
        (slice(4, None), 60 - decoder.seam),
        (slice(0, -4), 0),
    ):
        prompt = Prompt.plain((*some_ids(10, 5), *chunk[cut], *some_ids(25, 6)))
        report = blender.run(prompt, REUSE).report
        check_report(report, prompt)
        assert report.tokens_reused == n_reused


@pytest.mark.parametrize("name", [name for name in HYBRIDS if "lfm" not in name])
def test_seams_and_states_bring_answers_nearer_to_full_prefill(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seam = kl_to_full(name)
    with monkeypatch.context() as patch:
        patch.setattr(recurrent, "SEAM", 0)
        patch.setattr(model_module, "SEAM", 0)
        without_seam = kl_to_full(name)
    after = RecurrentMixer.after

    def of_last_chunk(self: RecurrentMixer, before: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return after(self, self.empty, keys, values)

    monkeypatch.setattr(RecurrentMixer, "after", of_last_chunk)
    assert 0 < seam < without_seam
    assert seam < kl_to_full(name)


@pytest.mark.parametrize("name", HYBRIDS)
def test_an_older_transformers_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.23 mixers made other calls of their cache. Python 3.10 has no newer release."""
    model = tiny_model(name)
    monkeypatch.delattr(Cache, "get_conv_state")
    with pytest.raises(ModelUnsupported):
        DecoderModel.of(model)


@dataclass(frozen=True)
class SomePolicy(Policy):
    """Another package's: recomputes these of a prompt's reusable tokens, whatever the ratio."""

    which: slice

    def select(self, layout: Layout, scores: torch.Tensor | None = None) -> torch.Tensor:
        return layout.reusable.nonzero()[self.which, 0]


@needs_recurrent
@pytest.mark.parametrize("which", [slice(0, 1), slice(0, -1), slice(-1, None), slice(5, 60, 2)])
def test_a_policy_that_chooses_among_a_chunks_tokens_is_refused(
    which: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that says nothing of models: an answer would be wrong in silence."""
    monkeypatch.setattr("blendserve.blend.blender.make_policy", lambda blend: SomePolicy(0.0, which))
    prompt = some_prompt([60, 50])
    by = tiny_blender(None, *(chunk.ids for chunk in prompt.chunks), decoder=tiny_decoder(HYBRIDS[0]))
    with pytest.raises(ConfigError) as error:
        by.run(prompt, REUSE)
    assert error.value.setting == "blend.policy"


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("blend.ratio", {"ratio": 0.05}),
    ("blend.ratio", {"ratio": "auto"}),
    ("blend.correction", {"correction": "prior"}),
    ("blend.refine", {"refine": 0.15}),
]


@needs_recurrent
@pytest.mark.parametrize(("setting", "changed"), SETTINGS)
def test_settings_that_choose_among_a_chunks_tokens_are_refused_by_name(setting: str, changed: Any) -> None:
    blend = BlendConfig(**{"method": "blend", "correction": "none", "ratio": 0.0, **changed})
    for method in ("full", "prefix", "reuse"):  # which choose nothing
        validate_blend(blend.with_values(method=method), tiny_decoder(HYBRIDS[0]))
    with pytest.raises(ConfigError) as error:
        tiny_blender(decoder=tiny_decoder(HYBRIDS[0])).run(some_prompt([20]), blend)
    assert error.value.setting == setting
