"""Fits the tables of one model on text: maps by ridge regression, axes by principal components, contexts.

Fitting goes layer by layer, like the decoder: a map is fitted on the codes that the decoder would have of the layer below
at the middle level, with their errors. The axes of the residual are those of a space in which errors weigh about equally:
each layer's keys and values are divided by their spread, and stretched by a power of the Fisher information
(engine/sensitivity.py). The full Fisher information weights errors of single tokens right, but errors that all tokens
share too low (research/decisions.md); a third between directions of one layer and three quarters between layers measured
best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from blendserve.errors import InputError
from blendserve.store.codecs.base import FittedModel, Progress, Sample
from blendserve.store.codecs.predict import rans
from blendserve.store.codecs.predict.rans import CLASSES, CONTEXTS, ESCAPE, ONE, SIZES, SYMBOLS, LayerMap
from blendserve.store.codecs.predict.tables import STEPS, VERSION, Tables, flat, quantised

FEWEST = 64  # tokens
WINDOWS = 24  # of text for the sensitivity
POWER = 0.35  # of the Fisher information, between directions of one layer
LEVEL_POWER = 0.75  # between layers, and between keys and values
FLOOR = 0.05  # minimum information of a direction, as a share of the mean
MIDDLE = 0.8  # step at which maps are fitted
RIDGE = 1e-3  # of each input's energy
FAINT = 0.2  # steps; an axis that spreads less is not coded
KNOWN = 1 << 14  # the first tokens of the vocabulary, the frequent ones, always have a row of layer 0
ROUNDS = 3  # of symbols from means and means from symbols
CONTEXT_TOKENS = 3072  # to learn contexts on
REACH = 1.1  # range of the codes, relative to that of the samples


@dataclass(slots=True)
class FittedLayer:
    """One layer's part of the tables, and the samples in its axes."""

    map: LayerMap
    n_axes: list[int]  # by level
    along: Tensor  # [C, W]: the residual, along its axes
    codes: Tensor  # [C, W]: the layer above is predicted from these


def fit(samples: Iterable[Sample], model: FittedModel | None, progress: Progress) -> Tables:
    """Fit tables. model: None = all errors weigh equally, and only tokens of the samples have rows.

    Raises InputError for too few samples.
    """
    parts = list[Tensor]()
    ids = list[int]()
    lengths = list[int]()
    heads = 0
    dim = 0
    for tokens, kv in samples:
        parts.append(flat(kv).bfloat16())
        ids += tokens
        lengths.append(kv.n_tokens)
        heads, _, dim = kv.keys[0].shape
    if sum(lengths) < FEWEST:
        raise InputError(f"{sum(lengths)} tokens are too few to fit tables on: give at least {FEWEST}")
    numbers = torch.cat(parts, dim=1)  # [L, C, W]
    n_layers, _, width = numbers.shape
    done = count(1)
    total = (min(WINDOWS, len(ids) // model.window) if model else 0) + n_layers
    weights = _weights(numbers, ids, model, lambda: progress(next(done), total))
    row_ids, rows = _first_rows(numbers[0], ids, model)
    scale, zero = _code_scale(torch.cat((rows, numbers[0].float())))
    below = rans.to_codes(numbers[0].float(), scale, zero)
    fitted = list[FittedLayer]()
    for l in range(1, n_layers):
        fitted.append(_fit_layer(numbers[l].float(), below, weights[l]))
        below = fitted[-1].codes
        progress(next(done), total)
    means, classes, symbols = _learn_contexts(fitted, lengths, width)
    progress(next(done), total)

    def stacked(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A field of all maps [L - 1, ...]; a model of one layer has none."""
        fields = [getattr(layer.map, name) for layer in fitted]
        return torch.stack(fields) if fields else torch.empty(0, *shape, dtype=dtype)

    n_axes = [[layer.n_axes[level] for layer in fitted] for level in range(len(STEPS))]
    return Tables(
        shape=torch.tensor([VERSION, n_layers, heads, dim], dtype=torch.int32),
        steps=torch.tensor(STEPS),
        ids=torch.tensor(row_ids, dtype=torch.int32),
        rows=rans.to_codes(rows, scale, zero),
        code_scale=torch.cat((scale[None], stacked("code_scale", width))),
        code_zero=torch.cat((zero[None], stacked("code_zero", width))),
        maps=stacked("map", width, width, dtype=torch.int8),
        map_scale=stacked("map_scale", width),
        mean=stacked("mean", width),
        axes=stacked("residual", width, width, dtype=torch.int8),
        axes_scale=stacked("residual_scale", width),
        n_axes=torch.tensor(n_axes, dtype=torch.int32),
        means=means,
        classes=classes,
        symbols=symbols,
    )


def _weights(
    numbers: Tensor, ids: list[int], model: FittedModel | None, step: Callable[[], None]
) -> list[tuple[Tensor, Tensor]]:
    """Maps of each layer: numbers -> a space in which errors weigh about equally [W, W], and back. numbers: [L, C, W]."""
    spread = [max(float(x.float().std(0).square().mean().sqrt()), 1e-6) for x in numbers]
    fisher = model.sensitivity(tuple(ids), WINDOWS, step) if model else None
    if fisher is None:
        eye = torch.eye(numbers.shape[2])
        return [(eye / s, eye * s) for s in spread]
    level = [
        s * float(f.diagonal(dim1=-2, dim2=-1).mean()) ** 0.5 for s, f in zip(spread, fisher, strict=True)
    ]
    middle = float(np.exp(np.log(np.maximum(level[1:] or level, 1e-12)).mean()))
    return [_stretch(f, s, middle) for f, s in zip(fisher, spread, strict=True)]


def _stretch(fisher: Tensor, spread: float, middle: float) -> tuple[Tensor, Tensor]:
    """`_weights` of one layer. fisher: [2, W / 2, W / 2]."""
    there = list[Tensor]()
    back = list[Tensor]()
    for part in fisher.double():
        energy, axes = torch.linalg.eigh(part)
        energy = energy.clamp(min=0.0)
        mean = float(energy.mean().clamp(min=1e-30))
        level = (mean**0.5 * spread / middle) ** LEVEL_POWER / spread
        stretch = (energy / mean + FLOOR) ** (POWER / 2) * level
        there.append(axes * stretch @ axes.T)
        back.append(axes / stretch @ axes.T)
    blocks: Callable[..., Tensor] = torch.block_diag
    return blocks(*there).float(), blocks(*back).float()


def _first_rows(numbers: Tensor, ids: list[int], model: FittedModel | None) -> tuple[list[int], Tensor]:
    """Tokens in ascending order, and their layer 0 [R, W]. numbers: layer 0 of the samples [C, W]."""
    if model is None:
        found = {token: at for at, token in enumerate(ids)}
        known = sorted(found)
        return known, numbers[[found[token] for token in known]].float()
    known = sorted({*range(min(KNOWN, model.n_embeddings)), *ids})
    both = torch.cat(model.first_layer(known))  # [2 K, R, D]
    return known, both.transpose(0, 1).flatten(1).float().cpu()


def _code_scale(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[C, W] -> scale and zero [W] that map them to codes from -127 to 127."""
    low = numbers.amin(dim=0)
    high = numbers.amax(dim=0)
    half = ((high - low) / 2).clamp(min=1e-6) * REACH
    scale = 127.0 / half
    return scale, -(high + low) / 2 * scale


def _fit_layer(numbers: Tensor, below: Tensor, weights: tuple[Tensor, Tensor]) -> FittedLayer:
    """numbers: [C, W] of this layer. below: codes [C, W]."""
    there, back = weights
    inputs = below.float()
    matrix, map_scale, mean = _regress(inputs, numbers)
    predicted = inputs @ matrix.float() * map_scale + mean
    left = numbers - predicted
    weighed = left @ there
    energy, axes = torch.linalg.eigh((weighed.T @ weighed / len(weighed)).double())
    spread = energy.flip(0).clamp(min=0.0).sqrt()
    axes = axes.flip(1).float()
    residual, residual_scale = _to_int8(axes.T @ back)
    exact = residual.double() * residual_scale.double()  # what the decoder has, and the encoder inverts
    along = left @ torch.linalg.inv(exact).float()
    width = numbers.shape[1]
    n_axes = [min(width, -(-int((spread > FAINT * step).sum()) // 4) * 4) for step in STEPS]
    symbols = torch.from_numpy(_symbols(along.numpy(), MIDDLE)[0]).float()
    back_numbers = predicted + symbols @ exact.float() * MIDDLE
    code_scale, code_zero = _code_scale(back_numbers)
    made = LayerMap(matrix, residual, map_scale, mean, residual_scale, code_scale, code_zero)
    return FittedLayer(made, n_axes, along, rans.to_codes(back_numbers, code_scale, code_zero))


def _regress(inputs: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[C, W] -> [C, W]: weights of int8, their scale and the mean of the residual."""
    centre = inputs.mean(dim=0)
    target = numbers.mean(dim=0)
    x = inputs - centre
    y = numbers - target
    gram = (x.T @ x).double()
    gram += torch.diag(RIDGE * gram.diagonal() + 1e-3 * len(x))
    weights, scale = _to_int8(torch.linalg.solve(gram, (x.T @ y).double()).float())
    return weights, scale, target - centre @ weights.float() * scale


def _to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[n, W] -> int8 and a scale for each output [W]."""
    scale = (matrix.abs().amax(dim=0) / 127).clamp(min=1e-12)
    return (matrix / scale).round().clamp(-127, 127).to(torch.int8), scale


def _learn_contexts(
    fitted: list[FittedLayer], lengths: list[int], width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols' means by level, layer and axis; the class of a size and a context; the classes' distributions."""
    means = torch.zeros(len(STEPS), len(fitted), width, dtype=torch.int32)
    amounts = np.zeros((SIZES, CONTEXTS))
    seen = np.zeros((SIZES, CONTEXTS, SYMBOLS))
    chunks = _some_chunks(lengths)
    for level, step in enumerate(STEPS):
        below: list[np.ndarray | None] = [None] * len(chunks)
        for l, layer in enumerate(fitted):
            symbols, mean = _symbols(layer.along[:, : layer.n_axes[level]].numpy(), step)
            means[level, l, : len(mean)] = torch.from_numpy(mean)
            for n, (start, stop) in enumerate(chunks):
                values = symbols[start:stop]
                _count(values, rans.contexts_of(below[n], len(values)), mean, amounts, seen)
                below[n] = values
    counts = seen.sum(axis=2)
    usual = np.exp2(-np.maximum(0, 40 - np.arange(SIZES)) / 4)  # of an unseen cell: the size itself
    amount = (amounts + 4 * usual[:, None]) / (counts + 4)
    classes = rans.size_of((amount * ONE).astype(np.int64)).astype(np.uint8)
    merged = np.zeros((CLASSES, SYMBOLS))
    np.add.at(merged, classes.ravel(), seen.reshape(-1, SYMBOLS))
    return means, torch.from_numpy(classes), torch.from_numpy(rans.slots_of(_smooth(merged)).astype(np.int32))


def _symbols(along: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Numbers [C, N] -> symbols, and their means by axis; rounding depends on the means, so both are iterated."""
    symbols = along / np.float32(step)
    for _ in range(ROUNDS):
        mean = (np.abs(symbols.astype(np.float32)).mean(axis=0) * ONE).round().clip(4).astype(np.int32)
        symbols = quantised(along, step, mean)
    return symbols, mean


def _some_chunks(lengths: list[int]) -> list[tuple[int, int]]:
    """Spans of some chunks, spread over the samples, with about CONTEXT_TOKENS tokens."""
    ends = np.cumsum(lengths)
    every = max(1, int(ends[-1]) // CONTEXT_TOKENS)
    return [(int(end) - n, int(end)) for end, n in list(zip(ends, lengths, strict=True))[::every] if n]


def _count(
    values: np.ndarray, seen_below: np.ndarray, means: np.ndarray, amounts: np.ndarray, seen: np.ndarray
) -> None:
    """Count a chunk's symbols [C, N] by size and context."""
    wide = values.astype(np.int16)
    sizes = np.empty(values.shape, np.int64)
    symbols = np.where(wide > 0, 2 * wide - 1, -2 * wide).clip(0, ESCAPE)
    for t, row in enumerate(values):
        sizes[t] = rans.size_of(means)
        means = rans.update_means(means, row)
    cells = sizes * CONTEXTS + seen_below[:, None]
    amount = np.abs(wide).ravel()
    amounts += np.bincount(cells.ravel(), amount, amounts.size).reshape(amounts.shape)
    seen += np.bincount((cells * SYMBOLS + symbols).ravel(), minlength=seen.size).reshape(seen.shape)


def _smooth(seen: np.ndarray) -> np.ndarray:
    """[CLASSES, SYMBOLS] -> shares: both signs equally, with a geometric distribution as the prior."""
    both = seen.copy()
    both[:, 1:-1:2] = both[:, 2:-1:2] = (seen[:, 1:-1:2] + seen[:, 2:-1:2]) / 2
    size = (np.arange(SYMBOLS) + 1) // 2
    amount = np.exp2((np.arange(CLASSES) - 40) / 4)[:, None]
    ratio = amount / (1 + amount)
    prior = ratio**size * (1 - ratio)
    prior[:, ESCAPE] = ratio[:, 0] ** size[ESCAPE]
    found: np.ndarray = both + 8 * prior / prior.sum(axis=1, keepdims=True)
    return found
