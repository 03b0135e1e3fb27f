"""Requests whose jobs fail, are sliced, aborted or preempted; requests that are not blended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from blendserve.config import BlendConfig
from blendserve.errors import CorruptRecord, StoreUnavailable
from tests.support.vllm import Served, World, kl, words

SAME = 1e-5


def n_free(served: Served) -> int:
    return int(served.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@contextmanager
def unreadable(world: World, error: Exception, layer: int | None) -> Iterator[None]:
    """The worker's store raises when it is asked, or when a chunk's layer is read."""
    fetcher = world.served.runner.records.fetcher
    snapshot = fetcher.local.snapshot

    class Broken:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def get(self, key: bytes, count: bool = True) -> Any:
            if layer is None:
                raise error
            record = self.inner.get(key, count)

            def read(l: int) -> Any:
                raw = record.read(l)
                return bytes([raw[0] ^ 1]) + bytes(raw[1:]) if l == layer else raw

            return type(record)(record.key, record.header, read)

    @contextmanager
    def broken() -> Iterator[Any]:
        with snapshot() as inner:
            yield Broken(inner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetcher.local, "snapshot", broken)
        yield


@pytest.mark.parametrize("layer", [None, 0, 3])
def test_damaged_chunks_are_computed(world: World, layer: int | None) -> None:
    """A store that cannot be read when a job runs, and chunks of which one layer is damaged: vLLM's own answer."""
    ids = world.prompt(0, 1, 2)
    with unreadable(world, StoreUnavailable("gone"), layer):
        answer = world.served.one(ids)
    assert kl(world.full(ids), answer.logprobs) < SAME
    assert "tokens_approximate" not in answer.report


def test_one_damaged_chunk_is_computed_and_the_others_are_reused(world: World) -> None:
    ids, key = world.prompt(0, 1, 2, 3), world.own.blender.key(world.chunks[2])
    fetcher = world.served.runner.records.fetcher
    snapshot = fetcher.local.snapshot

    class Lost:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def get(self, asked: bytes, count: bool = True) -> Any:
            if asked == key:
                raise CorruptRecord(key, "lost")
            return self.inner.get(asked, count)

    @contextmanager
    def losing() -> Iterator[Any]:
        with snapshot() as inner:
            yield Lost(inner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetcher.local, "snapshot", losing)
        answer = world.served.one(ids, {"method": "reuse"})
    n_left = sum(len(world.chunks[n]) for n in (0, 1, 3))
    assert answer.report["tokens_matched"] == n_left


def test_chunks_that_were_deleted_are_not_found(world: World) -> None:
    ids = world.prompt(8, 9, 10)
    assert world.served.one(ids).report
    world.own.blender.writer.delete([world.chunks[n] for n in (8, 9, 10)])
    answer = world.served.one(ids)
    assert answer.report == {}
    assert kl(world.full(ids), answer.logprobs) < SAME


def test_a_job_that_fails_is_prefilled_by_vllm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, free = world.prompt(0, 1, 2), n_free(world.served)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(world.served.runner.passes, "run", broken)
    answer = world.served.one(ids)
    assert answer.report["error"]
    assert kl(world.full(ids), answer.logprobs) < SAME
    assert n_free(world.served) == free


def test_slices_change_nothing_and_others_decode_between_them(world: World) -> None:
    served, ids = world.served, world.prompt(0, 1, 2, 3)
    passes = served.runner.passes
    passes.slice_row_layers = 0
    whole, steps = served.one(ids), served.steps_during(ids)
    passes.slice_row_layers = 1  # a pause at each layer
    sliced = served.one(ids)
    n_sliced = served.steps_during(ids)
    passes.slice_row_layers = 0
    assert torch.equal(whole.logprobs, sliced.logprobs)
    assert n_sliced >= steps + len(passes.layers)


@pytest.mark.parametrize(("is_alone", "n_steps"), [(False, 6), (True, 2)])
def test_a_step_that_computes_nothing_else_has_more_slices(is_alone: bool, n_steps: int) -> None:
    """A job that pauses five times, in steps of one slice, or of three."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    from blendserve_vllm.jobs import JobQueue, pause
    from blendserve_vllm.plan import PrefillJob, Report
    from vllm.forward_context import ForwardContext, override_forward_context

    class Pausing:
        def run(self, job: PrefillJob) -> Report:
            for _ in range(5):
                pause()
            return Report(rows=1)

    queue, steps = JobQueue(Pausing(), slices_alone=3), 0
    keys: Any = None
    queue.add([PrefillJob("one", (1, 2), 0, (0,), keys, (), BlendConfig())])
    with override_forward_context(ForwardContext.__new__(ForwardContext)):
        while not (reports := queue.take_reports()):
            queue.step(is_alone)
            steps += 1
    assert reports == {"one": Report(rows=1)}
    assert steps == n_steps


def test_an_aborted_request_frees_its_blocks(world: World) -> None:
    served, free = world.served, n_free(world.served)
    passes = served.runner.passes
    passes.slice_row_layers = 1
    for n_steps in (1, 3, 6):  # before, in the middle of the scoring pass, and of the other one
        assert served.llm.reset_prefix_cache()
        served.abort_after(n_steps, world.prompt(0, 1, 2, 3))
        assert n_free(served) == free
    passes.slice_row_layers = 0
    assert "error" not in served.one(world.prompt(0, 1, 2)).report


def test_many_requests_at_once(world: World) -> None:
    """Eight of four methods, in any order of their jobs: each as alone."""
    prompts = [world.prompt(*chunks) for chunks in ((0, 1), (2, 3, 4), (1, 0, 5), (4, 2))] * 2
    params = ["exact", None, {"method": "reuse"}, {"policy": "deviation", "ratio": 0.15}] * 2
    alone = [world.served.one(ids, word) for ids, word in zip(prompts, params, strict=True)]
    together = world.served.ask(*prompts, params=params)
    for one, other in zip(alone, together, strict=True):
        assert kl(one.logprobs, other.logprobs) < SAME
        assert one.report.get("tokens_approximate", 0) > 0 or one.report == {}


@pytest.mark.parametrize("params", ["unknown", {"ratio": 3}, {"no_such_setting": 1}], ids=str)
def test_wrong_parameters_are_plain_vllm(world: World, params: object) -> None:
    ids = world.prompt(0, 1, 2)
    answer = world.served.one(ids, params)
    assert answer.report == {}
    assert kl(world.full(ids), answer.logprobs) < SAME


def test_prompts_without_stored_chunks_are_plain_vllm(world: World) -> None:
    ids = world.prompt(words(700, 50))
    answer = world.served.one(ids)
    assert answer.report == {}
    assert kl(world.full(ids), answer.logprobs) < SAME


def test_a_chunk_is_stored_by_vllm_and_reused(world: World) -> None:
    """The server's own KV serves as ours: the chunk is new, and its record is equal to what our engine computes."""
    chunk, served = words(240, 91), world.served
    answer = served.one((*world.own.context, *chunk), "store")
    assert answer.report == {"tokens_stored": len(chunk)}
    blended = served.one(world.prompt(0, chunk, 1), {"method": "reuse"})
    assert blended.report["tokens_matched"] == sum(map(len, (world.chunks[0], chunk, world.chunks[1])))
    world.own.blender.finder.refresh()
    own = world.own.prefill(
        world.prompt(0, chunk, 1), BlendConfig(method="reuse", policy="none", correction="none")
    )
    assert len(own.report.spans) == 3
    assert kl(own.result.logits.log_softmax(-1), blended.logprobs) < SAME
    other = served.one((*words(9, 1), *chunk), "store")  # behind another context
    assert other.report == {}


def test_requests_of_other_kinds_are_plain_vllm(world: World) -> None:
    from vllm import SamplingParams

    ids = world.prompt(0, 1, 2)
    assert world.served.llm.reset_prefix_cache()
    asked = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    output = world.served.llm.generate([{"prompt_token_ids": list(ids)}], asked, use_tqdm=False)[0]
    assert output.kv_transfer_params is None
    assert len(output.prompt_logprobs) == len(ids)
