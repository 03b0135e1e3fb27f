"""What kernels are told beside tensors. Nothing here knows a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention does beside softmax(scale * q k)."""

    scale: float
    window: int | None = None  # row i sees key j only if i - j < window
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of a set of positions in one layer: cos and sin as the model's own rotary module gives them, [S, R].

    R is D, less where only a part of each head is rotated, and 0 in layers without RoPE.
    """

    cos: Tensor
    sin: Tensor

    def at(self, rows: Tensor | slice) -> Rope:
        return Rope(self.cos[rows], self.sin[rows])

    @property
    def inverse(self) -> Rope:
        """The rotation that undoes this one. YaRN scales cos and sin; dividing by the squared length undoes that too."""
        length = self.cos.float() ** 2 + self.sin.float() ** 2
        return Rope((self.cos / length).to(self.cos.dtype), (-self.sin / length).to(self.sin.dtype))


Ropes = tuple[Rope, ...]  # one for each layer; layers that rotate alike share it

RecordView = tuple[int, Tensor, Tensor]  # where its first token stands; keys before RoPE and values [K, C, D]


class RecomputedTokens(NamedTuple):
    """The recomputed tokens of some chunks, ascending: how they came out, and where their stored KV is."""

    keys: Tensor  # [K, S, D] after RoPE, of all rows
    values: Tensor  # [K, S, D]
    rows: Tensor  # [N] int64: which of these are meant
    at: Tensor  # [N] int64: where their stored KV is
    sizes: Sequence[int]  # how many of them each chunk has
    others: Tensor  # int64, ascending: the chunks' other tokens, which are to be corrected
    other_sizes: Sequence[int]
    foreign: Sequence[float]  # of each chunk, above 0: what linear maps say of its tokens is scaled by it


class CorrectionParams(NamedTuple):
    """A correction's constants, explained in blend/corrections."""

    weight: float  # tokens' worth of trust in the mean over all chunks
    zero_prior: float  # tokens' worth of trust in nothing having moved
    key_scale: float  # of what keys are moved by, as far as this prompt's recomputed tokens say it
    value_scale: float  # and values
    penalty: float | None  # of the ridge regression; None: means alone
    prior_trust: float = 0.0  # tokens' worth of trust in the prior as it is
    prior_key_scale: float = 0.0  # of what keys are moved by, as far as the prior says it
    prior_value_scale: float = 0.0  # and values


class Prior(NamedTuple):
    """How one layer's stored tokens are expected to move: by [key before RoPE | value] W + c."""

    weights: Tensor  # [K, 2D, 2D] fp32
    constant: Tensor  # [K, 2D] fp32
