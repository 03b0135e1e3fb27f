"""What placing, scoring and correcting stored KV reads of a model: its shapes, and how its layers rotate and attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from blendserve.kernels.rotary import Rotary
from blendserve.kernels.types import AttentionSpec, Ropes
from blendserve.kv import KVShape


class ModelLayers(Protocol):
    """What settings of blending are checked against."""

    @property
    def n_kv_layers(self) -> int:
        """Number of layers that keep KV, the lowest ones."""

    @property
    def recurrent(self) -> frozenset[int]:
        """Layers that have a state in place of KV."""


class KVModel(ModelLayers, Protocol):
    """A model that another engine may run. `DecoderModel` is one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """The shapes of these layers."""

    @property
    def has_equal_layers(self) -> bool:
        """Whether all of them keep keys and values of one shape."""

    @property
    def rotary(self) -> Rotary: ...

    @property
    def specs(self) -> Sequence[AttentionSpec]:
        """The attention of each layer."""

    @property
    def attention_forms(self) -> Sequence[tuple[int, int | None]]:
        """Each layer's number of query heads that share a kv head, H / K, and its sliding window."""

    def rope(self, positions: Tensor) -> Ropes:
        """cos and sin at these positions [S], for each layer."""

    def attended_kv(self, l: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What the queries of layer l meet, of its rotated keys and values [K, T, D]."""
