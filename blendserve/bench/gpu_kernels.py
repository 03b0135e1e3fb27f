"""`blendserve bench gpu_kernels`: attention and KV placement alone, against SDPA and the copy rate.

Attention runs the rows of a blended prefill (15% of the context and the question) and all rows, against SDPA with a
boolean mask. Placement is one layer of six chunks, each byte read and written once. A time is the mean of calls that the
device gets one after another. Runs on a CPU, too, with the kernels that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, speedup, table
from blendserve.bench.roofline import Rates, measure_rates
from blendserve.bench.runner import Bench, BenchConfig, open_reader
from blendserve.config import Positive
from blendserve.kernels.cuda.dense import BACKENDS
from blendserve.kernels.ops import ATTEND, place
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
from blendserve.models.model import DecoderModel
from blendserve.timing import Clock

RATIO, SUFFIX, CHUNKS = 0.15, 40, 6
WARM, TIMED = 3, 20
MASKED = "rows, SDPA boolean mask"


class KernelsConfig(BenchConfig):
    """Kernels alone."""

    heads: tuple[Annotated[str, Field(pattern=r"^\d+/\d+/\d+$")], ...] = Field(
        ("32/8/128", "28/4/128"), description="Attention shapes: query heads/KV heads/head dimension."
    )
    contexts: tuple[Positive, ...] = Field((3072, 16_384, 32_256), description="Context lengths, in tokens.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk of the placed KV, in tokens.")
    repeats: Positive = Field(3, description="Number of measured rounds.")


def groups(config: KernelsConfig, log: SampleLog) -> Iterator[Group]:
    reader = open_reader(config, log)
    adapter = reader.adapter
    rates = measure_rates(adapter.dtype, adapter.device)
    for heads in config.heads:
        for context in config.contexts:
            labels = {"kernel": "attention", "heads": heads, "context": context}
            if not log.done(labels):
                yield Group(labels, list(_attention(heads, context, adapter.dtype, adapter.device, rates)))
    if not log.done({"kernel": "placement"}):
        case = Case(
            {"implementation": "blendserve"}, partial(_placement, adapter, config.chunk_tokens, rates)
        )
        facts = {
            "flops": rates.flops,
            "copied_bytes_s": rates.bytes,
            "host_to_device_bytes_s": _link(adapter.device),
        }
        yield Group({"kernel": "placement"}, [case], facts)


def _attention(
    heads: str, context: int, dtype: torch.dtype, device: torch.device, rates: Rates
) -> Iterator[Case]:
    n_heads, n_kv_heads, dim = map(int, heads.split("/"))
    n, group, spec = context + SUFFIX, n_heads // n_kv_heads, AttentionSpec(dim**-0.5)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(n, generator=generator) < RATIO
    chosen[context:] = True
    at = chosen.nonzero()[:, 0]
    q, keys, values = (
        torch.randn(size, n, dim, generator=generator).to(device, dtype)
        for size in (n_heads, n_kv_heads, n_kv_heads)
    )
    some, rows = q[:, at.to(device)], plan_rows(at.to(device), group, None, at)
    every = plan_rows(torch.arange(n, device=device), group, None, torch.arange(n))
    ours, dense = (ATTEND.select(x, keys, values, spec, plan) for x, plan in ((some, rows), (q, every)))
    mask = torch.arange(n, device=device)[None] <= rows.positions[:, None]
    calls: dict[str, Callable[[], object]] = {
        "rows": partial(ours.run, some, keys, values, spec, rows),
        MASKED: partial(_masked, some, keys, values, mask, spec.scale),
        "all": partial(dense.run, q, keys, values, spec, every),
    }
    for name, call in calls.items():
        positions = at if name.startswith("rows") else torch.arange(n)
        flops = 4.0 * n_heads * dim * float((positions + 1).sum())
        yield Case({"implementation": name}, partial(_timed, call, device, flops / rates.flops))


def _timed(call: Callable[[], object], device: torch.device, bound_s: float) -> Metrics:
    seconds = seconds_of(call, device)
    return {"time_s": seconds, "roofline_fraction": bound_s / seconds}


def _masked(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The mask is given: its making is not timed."""
    with sdpa_kernel(BACKENDS):
        many = len(q) != len(keys)
        out = F.scaled_dot_product_attention(
            q[None], keys[None], values[None], mask, scale=scale, enable_gqa=many
        )
    return out[0].transpose(0, 1).reshape(q.shape[1], -1)


def _placement(adapter: DecoderModel, chunk_tokens: int, rates: Rates) -> Metrics:
    device, shape = adapter.device, (adapter.n_kv_heads, chunk_tokens, adapter.head_dim)
    layer = [[torch.randn(shape, device=device).to(adapter.dtype) for _ in range(2)] for _ in range(CHUNKS)]
    n = CHUNKS * chunk_tokens
    cache = torch.zeros(2, shape[0], n, shape[2], device=device, dtype=adapter.dtype)
    placed = [(chunk_tokens * i, keys, values) for i, (keys, values) in enumerate(layer)]
    rope = adapter.rope(torch.arange(n, device=device))[0]
    n_bytes = 2 * CHUNKS * layer[0][0].numel() * adapter.dtype.itemsize
    with torch.inference_mode():
        call = partial(place, placed, cache[0], cache[1], rope, adapter.rotary)
        return _timed(call, device, n_bytes / rates.bytes)


def _link(device: torch.device, size: int = 1 << 26) -> float:
    """Bytes a second from pinned memory to the device."""
    source = torch.ones(size, dtype=torch.uint8)
    source = source.pin_memory() if device.type == "cuda" else source
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / seconds_of(lambda: target.copy_(source, non_blocking=True), device, 5)


def seconds_of(call: Callable[[], object], device: torch.device, times: int = TIMED) -> float:
    """Of one call among many that the device gets one after another."""
    for _ in range(WARM):
        call()
    clock = Clock(device)
    start = clock.elapsed()
    for _ in range(times):
        call()
    return (clock.elapsed() - start) / times


TABLE = table(
    "Kernels",
    ms("ms", "time_s"),
    count("of roofline", "roofline_fraction", digits=2),
    speedup("x masked SDPA", "time_s", implementation=MASKED),
)
TINY = {"heads": ("4/2/16",), "contexts": (90,), "chunk_tokens": 30, "repeats": 1}
BENCH = Bench(KernelsConfig, groups, (TABLE,), tiny=TINY)
