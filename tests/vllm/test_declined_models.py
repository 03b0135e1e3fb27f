"""vLLM starts with models and options that are declined, and serves. One engine at a time: no `world` of other tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import make_model, serving, words


@pytest.mark.parametrize(
    ("kind", "reason", "options"),
    [
        ("deepseek_v2", "latent", {}),
        ("llama", "adapters", {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}),
        ("llama", "draft models", {"method": "draft_model", "num_speculative_tokens": 2}),
    ],
    ids=["latent", "adapters", "draft"],
)
def test_the_reason_is_known_and_vllm_serves(
    kind: str, reason: str, options: dict[str, object], tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    model = make_model(kind, tmp_path / "model")
    more = {"speculative_config": {**options, "model": str(model)}} if "method" in options else options
    with serving(model, tmp_path / "kv", {"precomputed": False}, **more) as served:
        assert reason in served.connector.declined
        assert served.scheduler.connector.planner is None
        answer = served.one(words(200, 1), new=3)
    assert len(answer.tokens) == 3
    assert answer.report == {}
