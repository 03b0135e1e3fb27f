"""The correction prior that vLLM fits on prompts of stored chunks is the one that our own engine fits on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blendserve.blend.priors import StoredPriors, prompts_of
from blendserve.engine.prompt import PromptBuilder
from tests.support.vllm import CHUNK_TOKENS, Own, kl, make_model, ranks, serving, words, world_of


@pytest.mark.parametrize("options", [{}, ranks(2)], ids=["1 rank", "2 ranks"])
def test_a_prior_is_fitted_by_vllm(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    folder, store = make_model("llama", tmp_path / "model"), tmp_path / "kv"
    own = Own(folder, store)
    chunks = [words(n, seed) for seed, n in enumerate(CHUNK_TOKENS)]
    own.store_chunks(chunks, fit_priors=False)
    prefix = PromptBuilder(own.model.tokenizer, own.config.prompt).prefix
    prompts = prompts_of(chunks, prefix, own.model.decoder.context_limit)
    expected = own.blender.priors.fit(chunks)
    assert expected is not None
    assert own.blender.priors.current() is None
    with serving(folder, store, **options) as served:
        answers = [served.one(prompt.ids, "fit") for prompt in prompts]
        fitted = [answer.report.get("tokens_fitted", 0) for answer in answers]
        exact = served.one(prompts[0].ids, "exact")
        assert kl(exact.logprobs, answers[0].logprobs) < 1e-5  # it is prefilled in full
        nothing = served.one(words(300, 77), "fit")
        assert nothing.report == {}
    assert fitted == sorted(fitted)
    assert fitted[-1] == sum(map(len, prompts))
    about = own.model.decoder, own.model.fingerprint, own.store, prefix, own.context
    found = StoredPriors(*about).current()
    assert found is not None
    for ours, theirs in zip(found.weights, expected.weights, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01  # they are stored in bf16


def test_a_prior_that_the_store_has_stays(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    with world_of("llama", tmp_path) as world:
        before = world.own.blender.priors.hash()
        assert before is not None
        report = world.served.one(world.prompt(0, 1, 2, 3), "fit").report
        assert report == {"correction": "prior"}
        assert world.own.blender.priors.hash() == before
