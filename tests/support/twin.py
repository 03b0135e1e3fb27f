"""A naive twin of the blending prefill: dense, float64 attention, and nothing of `blendserve.blend`.

It starts from the KV that the model's own forward computes, follows the rows that the run under test chose, and states
the constants of the corrections as numbers. Selections are checked against its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blendserve.core import Prompt, Span, TokenIds
from blendserve.kernels.rotary import HALVES
from blendserve.kernels.types import CorrectionParams, Prior, RecomputedTokens, Rope
from blendserve.models.model import DecoderModel
from tests.support.blending import model_kv
from tests.support.kernel_formulas import correct as formula

Pair = tuple[Tensor, Tensor]
Correct = Callable[[int, Pair, Pair, list[int]], Pair]
"""layer, stored keys before RoPE and values [K, T, D], fresh ones [K, S, D] of these rows -> corrected stored ones"""


@dataclass(frozen=True)
class Start:
    """What each token of a prompt starts from."""

    keys: list[Tensor]  # of each layer that keeps KV [K, T, D] before RoPE; 0 where nothing is stored
    values: list[Tensor]
    known: Tensor  # [T] bool: stored
    exact: Tensor  # [T] bool: stored, and computed behind the same tokens
    spans: tuple[Span, ...]  # of the tokens that are stored and not exact, by chunk or run

    @property
    def reusable(self) -> Tensor:
        return self.known & ~self.exact


@dataclass(frozen=True)
class Piece:
    """Tokens of the prompt whose KV is stored: from `at` on in a chunk that was computed behind `context`."""

    span: Span
    source: TokenIds
    at: int
    context: TokenIds


def start_from(decoder: DecoderModel, prompt: Prompt, pieces: Sequence[Piece]) -> Start:
    """A piece is exact if its KV was computed behind the same tokens."""
    n, ids = len(prompt), prompt.ids
    keys, values = ([torch.zeros(shape.heads, n, shape[i]) for shape in decoder.kv_shapes] for i in (1, 2))
    known, exact = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    spans = []
    for piece in pieces:
        here, first = slice(piece.span.start, piece.span.stop), len(piece.context) + piece.at
        there = slice(first, first + len(piece.span))
        found_keys, found_values = model_kv(decoder, piece.context + piece.source)
        ropes = decoder.rope(torch.arange(there.start, there.stop))
        for l in range(decoder.n_kv_layers):
            keys[l][:, here] = decoder.rotate(found_keys[l][:, there], ropes[l].inverse)
            values[l][:, here] = found_values[l][:, there]
        known[here] = True
        if piece.context + piece.source[: piece.at] == ids[: here.start]:
            exact[here] = True
        else:
            spans.append(piece.span)
    return Start(keys, values, known, exact, tuple(spans))


@dataclass
class Twin:
    """What the naive prefill computed."""

    keys: list[Tensor]  # of each layer that keeps KV [K, T, D] after RoPE
    values: list[Tensor]
    logits: Tensor  # [V]
    deviations: list[Tensor] = field(default_factory=list)  # by layer, [S]: squared L2 of fresh V - stored V


@torch.inference_mode()
def naive_prefill(
    decoder: DecoderModel,
    prompt: Prompt,
    start: Start,
    rows: Sequence[Tensor],
    correct: Correct | None = None,
) -> Twin:
    """rows: positions that enter each layer, ascending, and the rows that leave the last one."""
    n, all_known = len(prompt), torch.ones(len(prompt), dtype=torch.bool)
    ropes = decoder.rope(torch.arange(n))
    hidden = decoder.embed(torch.tensor(prompt.ids)[rows[0]])
    twin = Twin([], [], torch.empty(0))
    for l in range(decoder.n_layers):
        fresh, here, source = decoder.project(l, hidden), rows[l], decoder.kv_sources[l]
        if source == l:
            stored = start.keys[l], start.values[l]
            twin.deviations.append((fresh.v - stored[1][:, here]).square().sum(dim=(0, 2)))
            if correct is not None:
                stored = correct(l, stored, (fresh.k, fresh.v), here.tolist())
            keys, values = stored[0].clone(), stored[1].clone()
            keys[:, here], values[:, here] = fresh.k, fresh.v
            twin.keys.append(decoder.rotate(keys, ropes[l]))
            twin.values.append(values)
        left = torch.isin(here, rows[l + 1])
        here_rope = ropes[l].at(here)
        q = here_rope.scale_queries(decoder.rotate_queries(l, fresh.q, here_rope))[:, left]
        kv = twin.keys[source], twin.values[source]
        attended, _ = attend(decoder, l, q, *decoder.attended_kv(l, *kv), here[left], all_known)
        hidden = decoder.finish(l, hidden[left], attended)
    twin.logits = decoder.logits(hidden[-1:])[0]
    return twin


@torch.inference_mode()
def question_scores(decoder: DecoderModel, prompt: Prompt, start: Start) -> Tensor:
    """[T]: what the suffix takes from each stored token, over layers; tokens that are not stored are hidden from it."""
    n, n_suffix = len(prompt), len(prompt.suffix)
    rows, ropes = torch.arange(n - n_suffix, n), decoder.rope(torch.arange(n))
    seen = start.known.clone()
    seen[rows] = True
    hidden, total = decoder.embed(torch.tensor(prompt.suffix)), torch.zeros(n, dtype=torch.float64)
    read = list[tuple[Tensor, Tensor]]()
    for l in range(decoder.n_layers):
        fresh, here_rope = decoder.project(l, hidden), ropes[l].at(rows)
        if decoder.kv_sources[l] == l:
            keys, values = start.keys[l].clone(), start.values[l].clone()
            keys[:, rows], values[:, rows] = fresh.k, fresh.v
            read.append((decoder.rotate(keys, ropes[l]), values))
        keys, values = decoder.attended_kv(l, *read[decoder.kv_sources[l]])
        q = here_rope.scale_queries(decoder.rotate_queries(l, fresh.q, here_rope))
        attended, weights = attend(decoder, l, q, keys, values, rows, seen)
        sizes = values.double().square().sum(-1).sqrt()
        sizes = sizes.repeat_interleave(decoder.attention_forms[l][0], 0)  # [H, T]
        total += (weights * sizes[:, None]).mean(0).square().sum(0).sqrt()
        hidden = decoder.finish(l, hidden, attended)
    return total


def attend(
    decoder: DecoderModel, l: int, q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotated q [H, S, D] of these rows over keys and values [K, T, D] -> [S, H * D], and the weights [H, S, T]."""
    spec, at = decoder.specs[l], torch.arange(keys.shape[1])
    group = decoder.attention_forms[l][0]
    keys, values = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    scores = q.double() @ keys.mT * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    hidden = (at[None] > rows[:, None]) | ~seen[None]
    if spec.window:
        hidden |= rows[:, None] - at[None] >= spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        column = spec.sinks.double()[:, None, None].expand(-1, len(rows), 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(at)]
    out = (weights @ values).transpose(0, 1)
    return out.reshape(len(rows), -1).to(decoder.dtype), weights


# Corrections: the formula that kernels are compared with, and its constants as numbers


def correction(
    name: str, spans: Sequence[Span], n_layers: int, known: Callable[[int], Prior] | None = None
) -> Correct:
    """known: what is expected of each layer's tokens, for "prior"; without it that is "ridge"."""
    n_tokens = sum(len(span) for span in spans)

    def per_chunk(places: Sequence[int]) -> list[int]:
        return [sum(span.start <= at < span.stop for at in places) for span in spans]

    def correct(l: int, stored: Pair, fresh: Pair, rows: list[int]) -> Pair:
        places = [at for span in spans for at in range(span.start, span.stop)]
        inside = [i for i, at in enumerate(rows) if at in places]
        if l == 0 or not (inside or known):
            return stored
        recomputed, others = [rows[i] for i in inside], [at for at in places if at not in rows]
        # The share of a token's left context outside its own chunk scales what a prior expects of it.
        outside = [max(1, span.start) / span.stop if known else 1.0 for span in spans]
        tokens = RecomputedTokens(
            keys=fresh[0],
            values=fresh[1],
            row_index=torch.tensor(inside, dtype=torch.long),
            recomputed_index=torch.tensor(recomputed, dtype=torch.long),
            recomputed_per_chunk=per_chunk(recomputed),
            reused_index=torch.tensor(others, dtype=torch.long),
            reused_per_chunk=per_chunk(others),
            context_weight=outside,
        )
        penalty = 8.0 * sum(x.shape[-1] for x in stored)  # 8 for each number of a token's key and value
        if known:
            dare = 0.8 + 0.2 * min(1.0, len(inside) / n_tokens / 0.15)
            of_keys = dare * (0.85 - 0.35 * l / max(1, n_layers - 1))
            params = CorrectionParams(16.0, 40.0, 0.3 * dare, 0.5 * dare, penalty, 20.0, of_keys, 0.85 * dare)
        elif name == "shift":
            params = CorrectionParams(16.0, 0.0, 0.5, 0.5, None)
        else:
            params = CorrectionParams(16.0, 40.0, 0.55, 0.7, penalty)
        unrotated = Rope(*torch.empty(2, stored[0].shape[1], 0))
        keys, values = formula(*stored, tokens, unrotated, HALVES, params, known and known(l))
        return keys.to(stored[0].dtype), values.to(stored[1].dtype)

    return correct
