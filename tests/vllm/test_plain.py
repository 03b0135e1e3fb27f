"""vLLM with a connector that blends nothing, and one that is short of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.vllm import make_model, serving, words, world_of


def test_a_model_that_is_declined_is_served(tmp_path: Path) -> None:
    """A failure policy that would fail requests: the connector does nothing, and the engine answers."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    model = make_model("llama", tmp_path / "model")
    with serving(model, tmp_path / "kv", failure_policy="fail") as served:
        answer = served.one(words(300, 1))
    assert torch.isfinite(answer.logprobs).all()
    assert answer.report == {}


def test_preempted_requests_are_blended_again(tmp_path: Path) -> None:
    """Eight requests of 20 blocks each in 70 blocks: some are preempted, which is counted, and all end."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    with world_of("llama", tmp_path, num_gpu_blocks_override=70, disable_log_stats=False) as world:
        prompts = [world.prompt(*(n % 6, n % 6 + 1, n % 6 + 2)) for n in range(8)]
        params = [None, "exact", {"method": "reuse"}, {"policy": "deviation", "ratio": 0.15}] * 2
        answers = world.served.ask(*prompts, params=params, new=200)
        assert [len(answer.tokens) for answer in answers] == [200] * 8
        assert all(torch.isfinite(answer.logprobs).all() for answer in answers)
        assert all(answer.report.get("error") is None for answer in answers)
        counted = {
            metric.name: metric.value for metric in world.served.llm.get_metrics() if hasattr(metric, "value")
        }
        assert counted["vllm:num_preemptions"] > 0
