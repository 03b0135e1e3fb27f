"""Prompts over tiny models, what is stored of them, and what the borrowed model itself says of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blendserve.blend.blender import Blender
from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.blend.layout import Layout, lay_out
from blendserve.blend.loader import KVLoader
from blendserve.blend.precompute import MissingChunk
from blendserve.blend.prefill import PassResult, PrefillPlan, blend_prefill
from blendserve.blend.priors import Priors
from blendserve.config import BlendConfig
from blendserve.core import PLAIN_SUFFIX, BlendReport, Chunk, Prompt, TokenIds, run
from blendserve.kv import Layers, join_layers
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.reference import full_cache, kv_of
from blendserve.store import KVStore
from blendserve.store.memory import MemoryStore
from blendserve.store.view import TensorView
from tests.support.models import tiny_decoder

VOCAB = 97  # of the tiny models; ids below 3 are special


def some_ids(n: int, seed: int = 0) -> TokenIds:
    draw = random.Random(f"{n} {seed}")
    return tuple(draw.randrange(3, VOCAB) for _ in range(n))


PREFIX = some_ids(5)  # of `some_prompt` and of `tiny_blender`


def some_prompt(lengths: Sequence[int], prefix: int = 5, suffix: int = 4, seed: int = 0) -> Prompt:
    """Chunks of these lengths, all different; equal arguments give equal prompts."""
    chunks = tuple(Chunk(some_ids(n, 1000 * seed + 2 + i)) for i, n in enumerate(lengths))
    return Prompt(some_ids(prefix, 1000 * seed), chunks, some_ids(suffix, 1000 * seed + 1))


def lay(
    decoder: DecoderModel, prompt: Prompt, found: Sequence[bool] | None = None, prefix: bool = True
) -> Layout:
    """The prompt's layout when the chunks marked in `found` (default: all) are stored, and the prefix if `prefix`."""
    computer = ChunkComputer(decoder, prompt.prefix)
    kvs = computer.compute([chunk.ids for chunk in prompt.chunks])
    marks = found if found is not None else [True] * len(kvs)
    views = {i: TensorView(kv) for i, (kv, mark) in enumerate(zip(kvs, marks, strict=True)) if mark}
    front = TensorView(computer.context_kv) if prefix else None
    return lay_out(prompt, front, views)


def tiny_blender(
    store: KVStore | None = None,
    *stored: TokenIds,
    decoder: DecoderModel | None = None,
    fingerprint: str = "reader",
    prefix: TokenIds = PREFIX,
    context: TokenIds | None = None,
    **options: Any,
) -> Blender:
    """A blender over a store that has these chunks, computed behind the prefix unless a context is given."""
    decoder, behind = decoder or tiny_decoder("llama"), prefix if context is None else context
    made = Blender(decoder, fingerprint, store or MemoryStore(1 << 30), prefix, behind, **options)
    if stored:
        made.writer.precompute(stored)
    return made


def missing(*chunks: TokenIds) -> list[MissingChunk]:
    return [MissingChunk(ids) for ids in chunks]


def blend(decoder: DecoderModel, prompt: Prompt, layout: Layout | None = None, **options: Any) -> PassResult:
    plan = PrefillPlan.of(layout or lay(decoder, prompt), BlendConfig(**options))
    return run(blend_prefill(decoder, plan))


@torch.inference_mode()
def model_says(decoder: DecoderModel, ids: TokenIds, **options: Any) -> Any:
    """`model.forward` on a whole prompt, with a cache that drops nothing (windows are masks, not evictions)."""
    inputs = torch.tensor([ids])
    model: Any = decoder.reference
    return model(input_ids=inputs, past_key_values=full_cache(decoder), use_cache=True, **options)


def model_logits(decoder: DecoderModel, prompt: Prompt) -> Tensor:
    logits: Tensor = model_says(decoder, prompt.ids).logits[0, -1]
    return logits


def model_kv(decoder: DecoderModel, ids: TokenIds) -> tuple[Layers, Layers]:
    """The model's own cache, [L, K, T, D] each, keys after RoPE."""
    return kv_of(decoder, model_says(decoder, ids).past_key_values)


def distance(a: Tensor | Sequence[Tensor], b: Tensor | Sequence[Tensor]) -> float:
    """Largest difference of two tensors, or of those of several layers; NaN counts as infinite."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):  # a cache names layers that share KV, too
        return max(distance(x, y) for x, y in zip(a, b, strict=False))
    return float((a.float() - b.float()).abs().nan_to_num(float("inf")).max().detach()) if a.numel() else 0.0


class OneOff(KVLoader):
    """Rotates every stored key to the position after its own."""

    def place(self, l: int) -> None:
        right, self.ropes = self.ropes, self.model.rope(torch.arange(1, self.cache.capacity + 1))
        super().place(l)
        self.ropes = right


def some_priors(decoder: DecoderModel, scale: float) -> Priors:
    """Random linear maps; at a scale of 0.3 they move stored tokens visibly."""
    generator, weights, constants = torch.Generator().manual_seed(0), [], []
    for heads, *dims in decoder.kv_shapes[1:]:
        size = sum(dims)
        weights.append(scale * torch.randn(heads, size, size, generator=generator) / size**0.5)
        constants.append(scale * torch.randn(heads, size, generator=generator))
    return Priors(join_layers(weights), join_layers(constants))


def check_report(report: BlendReport, prompt: Prompt) -> None:
    """Every invariant of a report."""
    assert [0, *(span.stop for span in report.layout)] == [
        *(span.start for span in report.layout),
        len(prompt),
    ]
    for span in report.layout:
        assert span.is_moved or not span.recomputed
        assert all(span.start <= at < span.stop for at in span.recomputed)
    assert sum(n for _, n in report.states) == len(prompt)
    names = ("exact", "kept", "reused", "recomputed", "computed", "suffix")
    kinds = [getattr(report, f"tokens_{name}") for name in names]
    assert min(kinds) >= 0
    assert sum(kinds) == report.tokens_prompt == len(prompt)
    assert 0 <= report.tokens_first <= report.tokens_exact
    assert report.blended == (report.reason == "")
    counts = (report.chunks_hit, report.chunks_missing, report.chunks_corrupt)
    assert min(counts) >= 0
    assert sum(counts) <= report.chunks
    if prompt.is_plain:
        check_spans(report, prompt)
    else:
        assert (report.chunks, report.spans) == (sum(map(bool, map(len, prompt.chunks))), [])
    assert sum(report.tiers.values()) == report.chunks_hit
    for near in report.near:
        assert near["tokens_stored"] + near["tokens_fresh"] == len(prompt.chunks[near["chunk"]])
    assert 0 <= report.share_recomputed <= 1


def check_spans(report: BlendReport, prompt: Prompt) -> None:
    """Of a plain prompt: ascending, none overlapping, and the last 16 tokens are in none."""
    ends = [
        0,
        *(end for span in report.spans for end in (span["start"], span["stop"])),
        len(prompt) - PLAIN_SUFFIX,
    ]
    assert not report.spans or ends == sorted(ends)
    hit = [span for span in report.layout if span.donor and span.lookup == "hit"]
    assert report.chunks_hit == len({span.chunk for span in hit})
    assert len(report.spans) == len({span.chunk for span in hit if span.is_read})
    n_tokens = sum(span["stop"] - span["start"] for span in report.spans)
    assert n_tokens == report.tokens_first + report.tokens_reused + report.tokens_recomputed


def assert_near(a: Tensor | Sequence[Tensor], b: Tensor | Sequence[Tensor], bound: float = 1e-4) -> None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        assert a.shape == b.shape
    assert distance(a, b) < bound, f"max difference {distance(a, b):.3g}, allowed {bound:.3g}"


class TracedCache(KVCache):
    """Holds NaN until it is written, and keeps which rows the prefill wrote in each layer.

    The pass that scores tokens for the question writes its rows as a slice; those are no rows of the prefill.
    """

    def __init__(self, decoder: DecoderModel, capacity: int) -> None:
        super().__init__(decoder, capacity)
        self.fill(float("nan"))
        self.rows: list[Tensor] = []

    def write(self, l: int, at: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        if isinstance(at, Tensor):
            self.rows = self.rows if l else []  # a pass that a damaged layer ends begins again
            assert l == len(self.rows)
            self.rows.append(at.clone())
        super().write(l, at, keys, values)
