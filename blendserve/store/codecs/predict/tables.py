"""The codec's tables for one model, and their bytes (safetensors: no code in them, every length checked)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, cat

from blendserve.kv import ChunkKV, stacked
from blendserve.store.codecs.predict.rans import CLASSES, CONTEXTS, ONE, SIZES, SYMBOLS, LayerMap, RansModel

BIT = 0.11  # squared steps of error that a bit must remove: about as much as a finer step (research/decisions.md)
STEPS = 0.33, 0.43, 0.54, 0.75, 1.05  # of levels 1 to 5, in units of the axes, where tables are fitted
VERSION = 3
_INT8, _FP32, _INT32 = torch.int8, torch.float32, torch.int32


@dataclass(frozen=True, eq=False)
class Tables:
    """Tables of W = 2 * K * D numbers per token and layer: keys head after head, then values."""

    shape: Tensor  # [4] of int32: version, L, K, D
    steps: Tensor  # [levels] of fp32, ascending: each level's step
    ids: Tensor  # [R] of int32, ascending: tokens with a row of layer 0
    rows: Tensor  # [R, W] of int8: their codes
    code_scale: Tensor  # [L, W] of fp32: code = number * scale + zero
    code_zero: Tensor  # [L, W]
    maps: Tensor  # [L - 1, W, W] of int8: codes of the layer below -> numbers
    map_scale: Tensor  # [L - 1, W] of fp32
    mean: Tensor  # [L - 1, W] of fp32
    axes: Tensor  # [L - 1, W, W] of int8: axis, largest first -> numbers
    axes_scale: Tensor  # [L - 1, W] of fp32
    n_axes: Tensor  # [levels, L - 1] of int32: number of coded axes
    means: Tensor  # [levels, L - 1, W] of int32: mean size of an axis' symbols, 12 fractional bits
    classes: Tensor  # [SIZES, CONTEXTS] of uint8
    symbols: Tensor  # [CLASSES, SYMBOLS] of int32: slots

    @property
    def head_dim(self) -> int:
        return int(self.shape[3])

    @property
    def width(self) -> int:
        return 2 * int(self.shape[2]) * int(self.shape[3])

    def to_bytes(self) -> bytes:
        raw: bytes = save({field.name: getattr(self, field.name).contiguous() for field in fields(self)})
        return raw

    @classmethod
    def parse(cls, raw: bytes) -> Tables:
        """Raises ValueError for bytes that are no such tables."""
        try:
            found = load(raw)
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"they cannot be read: {error}") from None
        if set(found) != {field.name for field in fields(cls)}:
            raise ValueError(f"they hold {', '.join(sorted(found)) or 'nothing'}")
        tables = cls(**found)
        tables._check()
        return tables

    def layer(self, l: int, level: int) -> LayerMap:
        """The maps and scales of layer l > 0 at a level."""
        at = l - 1
        n = int(self.n_axes[level - 1, l - 1])
        matrices = self.maps[at], self.axes[at, :n]
        scales = self.map_scale[at], self.mean[at], self.axes_scale[at] * self.steps[level - 1]
        return LayerMap(*matrices, *scales, self.code_scale[l], self.code_zero[l])

    def inverse(self, l: int) -> Tensor:
        """[W, W]: numbers of layer l > 0 -> its axes."""
        inverse: Tensor = torch.linalg.inv(self.axes[l - 1].double() * self.axes_scale[l - 1].double())
        return inverse.float()

    @cached_property
    def model(self) -> RansModel:
        return RansModel(self.classes.numpy(), self.symbols.numpy().astype(np.uint16))

    def _check(self) -> None:
        """Raise ValueError for wrong shapes, indices out of range, and NaN."""
        if self.shape.shape != (4,) or int(self.shape[0]) != VERSION or (self.shape < 1).any():
            raise ValueError(f"their version and shape are {self.shape.tolist()}")
        layers = int(self.shape[1])
        width = self.width
        levels = len(STEPS)
        n = len(self.ids)
        wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "shape": (_INT32, (4,)),
            "steps": (_FP32, (levels,)),
            "ids": (_INT32, (n,)),
            "rows": (_INT8, (n, width)),
            "n_axes": (_INT32, (levels, layers - 1)),
            "means": (_INT32, (levels, layers - 1, width)),
            "classes": (torch.uint8, (SIZES, CONTEXTS)),
            "symbols": (_INT32, (CLASSES, SYMBOLS)),
            **dict.fromkeys(("code_scale", "code_zero"), (_FP32, (layers, width))),
            **dict.fromkeys(("maps", "axes"), (_INT8, (layers - 1, width, width))),
            **dict.fromkeys(("map_scale", "mean", "axes_scale"), (_FP32, (layers - 1, width))),
        }
        for name, (dtype, shape) in wanted.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
            if dtype == _FP32 and not torch.isfinite(tensor).all():
                raise ValueError(f"{name} holds what is no number")
        if ((self.n_axes < 0) | (self.n_axes > width)).any() or (self.means < 0).any():
            raise ValueError("there are more axes than numbers, or sizes below 0")
        if (self.steps <= 0).any() or (self.steps[1:] <= self.steps[:-1]).any():
            raise ValueError(f"the levels' steps are {self.steps.tolist()}")
        if (self.ids[1:] <= self.ids[:-1]).any() or (self.code_scale <= 0).any():
            raise ValueError("tokens are not in order, or a scale is not above 0")
        if ((self.symbols < 0) | (self.symbols > 4096)).any():
            raise ValueError("a symbol has more slots than there are")
        _ = self.model


def flat(kv: ChunkKV) -> Tensor:
    """[L, C, W] in fp32: keys head after head, then values."""
    both = cat((stacked(kv.keys), stacked(kv.values)), dim=1).detach().cpu().float()  # [L, 2 K, C, D]
    return both.transpose(1, 2).flatten(2).nan_to_num(0.0, 0.0, 0.0)


def quantised(along: np.ndarray, step: float, means: np.ndarray) -> np.ndarray:
    """Numbers [C, N] of fp32 -> symbols of int8. means: mean size of an axis' symbols [N], 12 fractional bits.

    Of the two symbols around a number it gets the larger one if the error that this removes is worth the bits: those of a
    geometric distribution of that mean, and a sign's for a symbol of 1. In numpy: torch's threads would wait for each
    other in the writing thread.
    """
    bits = np.log2(1 + ONE / np.maximum(means, 4).astype(np.float32))
    steps = np.abs(along) / np.float32(step)
    whole = np.floor(steps)
    up = steps - whole > np.float32(0.5) + np.float32(BIT / 2) * (bits + (whole == 0))
    found: np.ndarray = np.copysign(whole + up, along).clip(-128, 127).astype(np.int8)
    return found
