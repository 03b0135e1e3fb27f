"""Decoding steps captured in a graph equal plain steps, with nothing fixed that changes by token; memory of caches."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from blendserve.kv import stacked
from blendserve.models.forward import Row, run_captured
from blendserve.models.kv_cache import ALIGNMENT, CachePool, KVCache, recycled_empty
from blendserve.models.model import DecoderModel
from blendserve.models.runner import EAGER_STEPS, DecodeRunner, append_each
from tests.support.blending import assert_near
from tests.support.kernel_switches import plain_torch
from tests.support.models import KINDS, fresh_model, tiny_decoder

SLOTS, ROOM = 4, 40


class Replay:
    """A graph's double: the work itself, once for the capture and once for every call, into the same memory."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work, self.out, self.calls = work, work().clone(), 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return self.out.copy_(self.work())


def slots(decoder: DecoderModel) -> tuple[CachePool, list[KVCache]]:
    """A pool with random KV, and a copy of each slot as a cache of its own."""
    pool, alone = CachePool(decoder, SLOTS, ROOM), [KVCache(decoder, ROOM) for _ in range(SLOTS)]
    seeded = torch.Generator().manual_seed(0)
    for caches in zip(pool.caches, alone, strict=True):
        for l, (heads, *dims) in enumerate(decoder.kv_shapes):
            kv = [torch.randn(heads, ROOM, dim, generator=seeded) for dim in dims]
            for cache in caches:
                cache.write(l, slice(None), *kv)
    return pool, alone


@plain_torch()
@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma3_text", "cohere"])
def test_a_step_recorded_once_serves_all_tokens_and_all_sets_of_slots(name: str) -> None:
    """As a capture does, tracing keeps what was launched and forgets why; it does not see the kernels of a CPU."""
    decoder = tiny_decoder(name)
    pool, alone = slots(decoder)
    keys, values = stacked(pool.keys), stacked(pool.values)

    def work(keys: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        caught: Any = run_captured
        out: Tensor = caught.__wrapped__(decoder, keys, values, *rows)
        return out

    recorded_at = torch.tensor([[3, 4, 5, 6], [9, 1, 0, 2], [9, 1, 39, 2]])
    graph = make_fx(work)(keys.clone(), values.clone(), recorded_at)
    for i in range(3):
        rows = torch.tensor([[0, 8 + i, 0, 7], [0, 20 + i, 0, 33 + i], [39, 20 + i, 39, 33 + i]])
        logits = graph(keys, values, rows)
        expected = append_each(decoder, [Row(alone[1], 20 + i, 8 + i), Row(alone[3], 33 + i, 7)])
        assert_near(logits[[1, 3]], expected, 1e-4)
    # a slot that has no row keeps its KV
    assert_near(keys[0][:, :, :39], stacked(alone[0].keys)[:, :, :39], 1e-9)


@pytest.mark.parametrize("name", ["llama", *KINDS, "gemma4_text-shared"])
def test_any_of_the_slots_step_as_they_do_alone(name: str) -> None:
    """Plainly for the first steps, and replayed from then on."""
    decoder, at, dice, captured = tiny_decoder(name), [5, 30, 17], random.Random(3), list[Replay]()
    pool, alone = slots(decoder)
    for cache in pool.caches:
        cache.fill(float("nan"), max(at))  # unwritten memory

    def capture(work: Callable[[], Tensor], device: torch.device) -> Replay:
        captured.append(Replay(work))
        return captured[-1]

    runner = DecodeRunner(decoder, pool.keys, pool.values, n_used=max(at), capture=capture)
    for made in range(EAGER_STEPS + 8):
        rows = sorted(dice.sample(range(3), dice.randint(1, 3)), key=lambda _: dice.random())
        tokens = [dice.randrange(3, 97) for _ in rows]
        got = torch.cat(runner.decode([(b, at[b], [t]) for b, t in zip(rows, tokens, strict=True)]))
        plain = [Row(alone[b], at[b], t) for b, t in zip(rows, tokens, strict=True)]
        assert_near(got, append_each(decoder, plain), 1e-4)
        assert [graph.calls for graph in captured] == [made - EAGER_STEPS + 1] * (made >= EAGER_STEPS)
        for b in rows:
            at[b] = min(at[b] + 1, ROOM - 2)  # the last place is for slots without a row
    for b, n in enumerate(at):
        got_kv, expected_kv = (cache.beginning(decoder, n) for cache in (pool.caches[b], alone[b]))
        assert_near(got_kv.keys, expected_kv.keys, 1e-4)
        assert_near(got_kv.values, expected_kv.values, 1e-4)


def test_a_failed_capture_is_not_tried_again() -> None:
    decoder, tried = fresh_model("llama"), list[Tensor]()

    def fails(work: Callable[[], Tensor], device: torch.device) -> Replay:
        tried.append(work())  # CUDA fails in the middle
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    cache, other = KVCache(decoder, ROOM), KVCache(decoder, ROOM)
    plain = append_each(decoder, [Row(other, 0, 5)])
    for _ in range(2):
        runner = DecodeRunner(decoder, stacked(cache.keys)[None], stacked(cache.values)[None], capture=fails)
        for _ in range(EAGER_STEPS + 3):
            assert torch.equal(runner.decode([(0, 0, [5])])[0], plain)
    assert len(tried) == 1


def test_the_memory_of_a_cache_is_reused_once_no_view_of_it_is_left() -> None:
    def cache_memory(n: int = 1000, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return recycled_empty((2, n, 3), dtype, torch.device("cpu"))

    first = cache_memory()
    at, view = first.data_ptr(), first[1, 5:]
    assert at % ALIGNMENT == 0
    del first
    view.fill_(1.0)
    other = cache_memory()
    other.fill_(2.0)
    assert (view == 1.0).all()
    del other, view  # that of the view is dropped last, and kept
    assert cache_memory(1100).data_ptr() == at  # a little more fits, too
    assert cache_memory(900, torch.float32).shape == (2, 900, 3)
    assert cache_memory(0).shape == (2, 0, 3)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux' /proc")
def test_a_slot_takes_memory_as_its_answer_grows() -> None:
    """Room for a whole context costs a short answer nothing; a decode that grows past it gives the same numbers."""
    decoder, whole = fresh_model("llama"), 1 << 29
    n_bytes = sum(shape.numbers for shape in decoder.kv_shapes) * decoder.dtype.itemsize
    before = resident()
    pool = CachePool(decoder, 8, whole // 8 // n_bytes)
    slots = [pool.acquire() for _ in range(pool.n)]
    alone, tokens = KVCache(decoder, 90), [5 + i % 31 for i in range(90)]
    for slot in slots:
        append_each(decoder, [Row(slot, at, token) for at, token in enumerate(tokens[:64])])
    assert resident() - before < whole / 8
    grown = [append_each(decoder, [Row(slots[0], at, tokens[at])]) for at in range(64, 90)]
    expected = append_each(decoder, [Row(alone, at, token) for at, token in enumerate(tokens)])
    assert_near(torch.cat(grown), expected[64:])


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
