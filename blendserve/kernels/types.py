"""Parameters of kernels. Nothing here depends on a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Parameters of a layer's attention, softmax(scale * q k) v."""

    scale: float
    window: int | None = None  # row i sees key j only if i - j < window
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    # [H] fp32: a score of each query head that takes its part of the softmax and has no value. None = there is none
    sinks: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Rope:
    """Rotation of a set of positions in one layer: cos and sin as the model's own rotary module gives them, [S, R].

    R is D, less where only a part of each head is rotated, and 0 in layers without RoPE.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None  # [S]: factor of queries after their rotation; None = 1

    def at(self, rows: Tensor | slice) -> Rope:
        scale = self.query_scale
        return Rope(self.cos[rows], self.sin[rows], None if scale is None else scale[rows])

    def scale_queries(self, q: Tensor) -> Tensor:
        """Rotated queries [H, S, D] times their factors."""
        return q if self.query_scale is None else q * self.query_scale[:, None]

    @cached_property
    def inverse(self) -> Rope:
        """The rotation that undoes this one. YaRN scales cos and sin; dividing by the squared length undoes that too."""
        length = self.cos.float() ** 2 + self.sin.float() ** 2
        return Rope((self.cos / length).to(self.cos.dtype), (-self.sin / length).to(self.sin.dtype))


Activation = Callable[[Tensor], Tensor]  # of an MLP's gate; kernels have F.silu and gelu_tanh


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU approximated by tanh, as Gemma has it."""
    return F.gelu(x, approximate="tanh")


Ropes = tuple[Rope, ...]  # one for each layer; layers that rotate alike share it

RecordView = tuple[int, Tensor, Tensor]  # position of its first token; keys before RoPE and values [K, C, D]


class RecomputedTokens(NamedTuple):
    """Fresh KV of the recomputed tokens of some chunks, and the places of recomputed and reused tokens, ascending."""

    keys: Tensor  # [K, S, D] after RoPE, of all rows of the pass
    values: Tensor  # [K, S, D]
    row_index: Tensor  # [N] int64: rows of recomputed tokens in `keys` and `values`
    recomputed_index: Tensor  # [N] int64: their places in the stored KV
    recomputed_per_chunk: Sequence[int]
    reused_index: Tensor  # int64: places of the chunks' other tokens, which are corrected
    reused_per_chunk: Sequence[int]
    context_weight: Sequence[float]  # of each chunk, above 0: scales what linear maps predict for its tokens


class CorrectionParams(NamedTuple):
    """A correction's constants, explained in blend/corrections."""

    chunk_shrinkage: float  # weight of the mean over all chunks in a chunk's mean, in tokens
    zero_shrinkage: float  # weight of zero in the mean over all chunks, in tokens
    key_scale: float  # factor of the deviation of keys that is fitted to this prompt's recomputed tokens
    value_scale: float  # the same of values
    penalty: float | None  # of the ridge regression; None: means alone
    prior_shrinkage: float = 0.0  # weight of 1 in the prior's factor, in tokens
    prior_key_scale: float = 0.0  # factor of the deviation of keys that the prior predicts
    prior_value_scale: float = 0.0  # the same of values


class Prior(NamedTuple):
    """A linear prediction of the deviation of a layer's stored tokens: [key before RoPE | value] W + c."""

    weights: Tensor  # [K, 2D, 2D] fp32
    constant: Tensor  # [K, 2D] fp32
