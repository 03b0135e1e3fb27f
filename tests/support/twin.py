"""A naive twin of the blending prefill: dense, float64 attention, and nothing of `blendserve.blend`.

It starts from the KV that the model's own forward computes, follows the rows that the run under test chose, and states
the corrections as loops with their constants as numbers. Selections are checked against its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blendserve.core import Prompt, Span, TokenIds
from blendserve.kernels.types import Prior
from blendserve.models.model import DecoderModel
from tests.support.blending import model_kv

Pair = tuple[Tensor, Tensor]
Correct = Callable[[int, Pair, Pair, list[int]], Pair]
"""layer, stored keys before RoPE and values [K, T, D], fresh ones [K, S, D] of these rows -> corrected stored ones"""


@dataclass(frozen=True)
class Start:
    """What each token of a prompt starts from."""

    keys: Tensor  # [L, K, T, D] before RoPE; 0 where nothing is stored
    values: Tensor
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


def start_from(adapter: DecoderModel, prompt: Prompt, pieces: Sequence[Piece]) -> Start:
    """A piece is exact if its KV was computed behind the same tokens."""
    n, ids = len(prompt), prompt.ids
    keys = torch.zeros(adapter.n_layers, adapter.n_kv_heads, n, adapter.head_dim)
    values, known, exact = keys.clone(), torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    spans = []
    for piece in pieces:
        here, first = slice(piece.span.start, piece.span.stop), len(piece.context) + piece.at
        there = slice(first, first + len(piece.span))
        found_keys, found_values = model_kv(adapter, piece.context + piece.source)
        ropes = adapter.rope(torch.arange(there.start, there.stop))
        for l in range(adapter.n_layers):
            keys[l, :, here] = adapter.rotate(found_keys[l][:, there], ropes[l].inverse)
        values[:, :, here], known[here] = found_values[:, :, there], True
        if piece.context + piece.source[: piece.at] == ids[: here.start]:
            exact[here] = True
        else:
            spans.append(piece.span)
    return Start(keys, values, known, exact, tuple(spans))


@dataclass
class Twin:
    """What the naive prefill computed."""

    keys: Tensor  # [L, K, T, D] after RoPE
    values: Tensor
    logits: Tensor  # [V]
    deviations: list[Tensor] = field(default_factory=list)  # by layer, [S]: squared L2 of fresh V - stored V


@torch.inference_mode()
def naive_prefill(
    adapter: DecoderModel,
    prompt: Prompt,
    start: Start,
    rows: Sequence[Tensor],
    correct: Correct | None = None,
) -> Twin:
    """rows: positions that enter each layer, ascending, and the rows that leave the last one."""
    n, all_known = len(prompt), torch.ones(len(prompt), dtype=torch.bool)
    ropes = adapter.rope(torch.arange(n))
    hidden = adapter.embed(torch.tensor(prompt.ids)[rows[0]])
    twin = Twin(torch.zeros_like(start.keys), torch.zeros_like(start.values), torch.empty(0))
    for l in range(adapter.n_layers):
        fresh, here = adapter.project(l, hidden), rows[l]
        stored = start.keys[l], start.values[l]
        twin.deviations.append((fresh.v - stored[1][:, here]).square().sum(dim=(0, 2)))
        if correct is not None:
            stored = correct(l, stored, (fresh.k, fresh.v), here.tolist())
        keys, values = stored[0].clone(), stored[1].clone()
        keys[:, here], values[:, here] = fresh.k, fresh.v
        twin.keys[l], twin.values[l] = adapter.rotate(keys, ropes[l]), values
        left = torch.isin(here, rows[l + 1])
        q = adapter.rotate(fresh.q, ropes[l].at(here))[:, left]
        attended, _ = attend(adapter, l, q, twin.keys[l], values, here[left], all_known)
        hidden = adapter.finish(l, hidden[left], attended)
    twin.logits = adapter.logits(hidden[-1:])[0]
    return twin


@torch.inference_mode()
def question_scores(adapter: DecoderModel, prompt: Prompt, start: Start) -> Tensor:
    """[T]: what the suffix takes from each stored token, over layers; tokens that are not stored are hidden from it."""
    n, n_suffix = len(prompt), len(prompt.suffix)
    rows, ropes = torch.arange(n - n_suffix, n), adapter.rope(torch.arange(n))
    seen = start.known.clone()
    seen[rows] = True
    hidden, total = adapter.embed(torch.tensor(prompt.suffix)), torch.zeros(n, dtype=torch.float64)
    for l in range(adapter.n_layers):
        fresh = adapter.project(l, hidden)
        keys, values = start.keys[l].clone(), start.values[l].clone()
        keys[:, rows], values[:, rows] = fresh.k, fresh.v
        q = adapter.rotate(fresh.q, ropes[l].at(rows))
        attended, weights = attend(adapter, l, q, adapter.rotate(keys, ropes[l]), values, rows, seen)
        sizes = values.double().square().sum(-1).sqrt().repeat_interleave(adapter.group, 0)  # [H, T]
        total += (weights * sizes[:, None]).mean(0).square().sum(0).sqrt()
        hidden = adapter.finish(l, hidden, attended)
    return total


def attend(
    adapter: DecoderModel, l: int, q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotated q [H, S, D] of these rows over keys and values [K, T, D] -> [S, H * D], and the weights [H, S, T]."""
    spec, at = adapter.specs[l], torch.arange(keys.shape[1])
    keys, values = (x.double().repeat_interleave(adapter.group, 0) for x in (keys, values))
    scores = q.double() @ keys.mT * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    hidden = (at[None] > rows[:, None]) | ~seen[None]
    if spec.window:
        hidden |= rows[:, None] - at[None] >= spec.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    out = (weights @ values).transpose(0, 1)
    return out.reshape(len(rows), -1).to(adapter.dtype), weights


# Corrections: tokens' worth of trust, sizes of the moves, penalties


def shift(spans: Sequence[Span]) -> Correct:
    """Half of the mean deviation of a chunk's recomputed tokens, drawn to the mean over all as by 16 more tokens."""

    def correct(l: int, stored: Pair, fresh: Pair, rows: list[int]) -> Pair:
        inside = [(i, at) for i, at in enumerate(rows) if any(s.start <= at < s.stop for s in spans)]
        out = stored[0].clone(), stored[1].clone()
        if l == 0 or not inside:
            return out
        for part, old, new in zip(out, stored, fresh, strict=True):
            difference = {at: new[:, i] - old[:, at] for i, at in inside}
            overall = torch.stack(list(difference.values())).mean(0)
            for span in spans:
                mine = [difference[at] for _, at in inside if span.start <= at < span.stop]
                move = (sum(mine, torch.zeros_like(overall)) + 16.0 * overall) / (len(mine) + 16.0)
                for at in set(range(span.start, span.stop)) - difference.keys():
                    part[:, at] += 0.5 * move
        return out

    return correct


def ridge(spans: Sequence[Span], n_layers: int, known: Callable[[int], Prior] | None = None) -> Correct:
    """Chunk means drawn to 0 as by 40 more tokens, and a linear map by least squares with sqrt(penalty) rows added.

    known: what is expected of each layer's tokens (`prior`); the map is fitted on what is left of that.
    """
    n_tokens = sum(len(span) for span in spans)

    def correct(l: int, stored: Pair, fresh: Pair, rows: list[int]) -> Pair:
        inside = [(i, at) for i, at in enumerate(rows) if any(s.start <= at < s.stop for s in spans)]
        if l == 0 or not (inside or known):
            return stored[0].clone(), stored[1].clone()
        which = [next(n for n, s in enumerate(spans) if s.start <= at < s.stop) for _, at in inside]
        of_rest, of_expected = (0.55, 0.7), (0.0, 0.0)
        other = torch.ones(stored[0].shape[1])  # the share of a token's left context outside its own chunk
        if known is not None:
            some = min(1.0, len(inside) / n_tokens / 0.15)
            dare = 0.8 + 0.2 * some
            depth = l / max(1, n_layers - 1)
            of_rest = 0.3 * dare, 0.5 * dare
            of_expected = dare * (0.85 + (0.5 - 0.85) * depth), dare * 0.85
            for span in spans:
                other[span.start : span.stop] = max(1, span.start) / span.stop
        out = []
        for head in range(stored[0].shape[0]):
            old = torch.cat([part[head] for part in stored], dim=-1)  # [T, 2D]
            dim, expected = old.shape[1] // 2, torch.zeros_like(old)
            if known is not None:
                rule = known(l)
                expected = other[:, None] * (old @ rule.weights[head] + rule.constant[head])
            at = [at for _, at in inside]
            now = torch.cat([part[head][[i for i, _ in inside]] for part in fresh], dim=-1)
            moved = now - old[at]
            share = _shares(expected[at], moved, dim)
            delta = _sizes(of_expected, dim) * share * expected
            if inside:
                rest = moved - share * expected[at]
                delta = delta + _sizes(of_rest, dim) * _learnt(old, rest, at, which, spans, other, dim)
            moves = torch.zeros_like(old)
            for span in spans:
                for token in set(range(span.start, span.stop)) - set(at):
                    moves[token] = delta[token]
            out.append(old + moves)
        both = torch.stack(out)
        return both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]

    return correct


def _sizes(pair: tuple[float, float], dim: int) -> Tensor:
    return torch.tensor(pair).repeat_interleave(dim)


def _shares(expected: Tensor, moved: Tensor, dim: int) -> Tensor:
    """[2D]: the slope of what moved on what was expected, as if 20 more tokens had moved as expected; 0 to 1."""
    found = []
    for e, m in zip(expected.chunk(2, dim=-1), moved.chunk(2, dim=-1), strict=True):
        typical = float(e.square().sum()) / max(1, len(e))
        top, bottom = float((e * m).sum()) + 20.0 * typical, float(e.square().sum()) + 20.0 * typical
        found += [min(1.0, max(0.0, top / bottom)) if bottom else 1.0] * dim
    return torch.tensor(found)


def _learnt(
    old: Tensor, rest: Tensor, at: list[int], which: list[int], spans: Sequence[Span], other: Tensor, dim: int
) -> Tensor:
    """[T, 2D]: the chunk's mean of what is left, and a ridge on the stored token."""
    overall = rest.sum(0) / (len(at) + 40.0)
    means = []
    for n in range(len(spans)):
        mine = [r - overall for r, w in zip(rest, which, strict=True) if w == n]
        means.append(overall + sum(mine, torch.zeros_like(overall)) / (len(mine) + 16.0))
    centred = other[:, None] * (old - old[at].mean(0))
    parts = []
    for part, whole in zip(centred.chunk(2, dim=-1), (other[:, None] * old).chunk(2, dim=-1), strict=True):
        spread, size = (float(x[at].square().mean().sqrt()) for x in (part, whole))
        parts.append(part / max(spread, size / 64, 1e-6))  # equal tokens differ by rounding alone
    features = torch.cat(parts, dim=-1).double()
    left = torch.stack([r - means[w] for r, w in zip(rest, which, strict=True)]).double()
    width = 2 * dim
    added = (8.0 * width) ** 0.5 * torch.eye(width, dtype=torch.float64)
    zeros = torch.zeros(width, width, dtype=torch.float64)
    solved = torch.linalg.lstsq(torch.cat([features[at], added]), torch.cat([left, zeros])).solution
    said: Tensor = (features @ solved).to(old.dtype)
    for n, span in enumerate(spans):
        said[span.start : span.stop] += means[n]
    return said
