"""The compiled kernels of rans.py, where they give the plain form's bytes and bits on this machine."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendserve.kernels import switches
from blendserve.kernels.cpu.build import Unavailable
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.cpu.library import loaded
from blendserve.store.codecs.predict import rans
from blendserve.store.codecs.predict.rans import (
    CLASSES,
    CONTEXTS,
    ESCAPE,
    ONE,
    SIZES,
    SYMBOLS,
    LayerMap,
    RansModel,
)


def native_library() -> rans.Library:
    """The kernels of the widest instruction set that pass their check on this machine; None = use the plain form."""
    return _native_library() if switches.is_native_on() else None


@cache
def _native_library() -> rans.Library:
    for level in reversed(LEVELS.values()):
        with suppress(Unavailable):
            if "rans_decode" in level.sources:
                check(library := loaded(level))
                return library
    return None


def check(library: SimpleNamespace) -> None:
    """Raises Unavailable unless the kernels give the plain form's bytes and bits."""
    model = random_model()
    generator = np.random.default_rng(0)
    layer = random_map(64, 20)
    codes = random_codes(40, 64)
    values = (generator.laplace(size=(40, 20)) * np.linspace(0.01, 9.0, 20)).clip(-128, 127).astype(np.int8)
    means = np.full(20, ONE // 3)
    for below in (random_codes(40, 37).numpy(), None):
        given = values, rans.contexts_of(below, 40), means, model
        wanted = rans.encode_reference(*given)
        _require(rans.encode(library, *given) == wanted, "rANS encoding")
        found = rans.decode(library, memoryview(wanted), below, 40, means, model)
        _require(np.array_equal(found, values), "rANS decoding")
    for dim, symbols in ((16, torch.from_numpy(values)), (8, random_codes(40, 20)), (16, None)):
        for dtype in (torch.float32, torch.bfloat16):  # the random codes give the largest possible integers
            args: Any = codes, symbols, layer, dim, dtype
            pairs = zip(rans.dequantize(library, *args), rans.dequantize_reference(*args), strict=True)
            _require(all(torch.equal(got, want) for got, want in pairs), "dequantizing KV")


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise Unavailable(f"wrong on this machine: {what}")


# Inputs of self-checks and tests


def random_model(seed: int = 0) -> RansModel:
    """Distributions of all widths."""
    spread = np.exp2(np.arange(CLASSES) / 4 - 9)[:, None]
    share = np.exp(-((np.arange(SYMBOLS) + 1) // 2) / spread)
    share[:, ESCAPE] = 1e-3
    moves = np.random.default_rng(seed).integers(-2, 3, (1, CONTEXTS))
    classes = (np.arange(SIZES)[:, None] + moves).clip(0, CLASSES - 1).astype(np.uint8)
    return RansModel(classes, rans.slots_of(share))


def random_codes(n: int, width: int, seed: int = 0) -> Tensor:
    """int8 [n, width], the extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (n, width), generator=generator, dtype=torch.int8)
    codes[:1] = -128
    return codes


def random_map(width: int, n_axes: int) -> LayerMap:
    """A layer of W = width and N = n_axes."""
    matrix, residual = (random_codes(n, width, n) for n in (width, n_axes))
    generator = torch.Generator().manual_seed(0)
    a, b, c, d, e = (torch.rand(width, generator=generator) for _ in range(5))
    return LayerMap(matrix, residual, a / 4096, b, c / 64, 16 * d, e)
