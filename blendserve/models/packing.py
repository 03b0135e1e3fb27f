"""Weights that stay quantised: a file's blocks packed for the kernels when a model is loaded."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from blendserve import console
from blendserve.errors import ModelUnsupported
from blendserve.kernels.cpu.bindings import packed, q8_0_blocks, strips_bytes
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.ops import take
from blendserve.kernels.packed import UNIT, PackedMatrix
from blendserve.kernels.selfcheck import widest
from blendserve.models.layers import Linear
from blendserve.models.weights import QuantisedMatrix, Weights

HUGE_PAGE = 2 << 20
NUMBERS = 1 << 20  # that are dequantised at once


def pack_weights(
    weights: Mapping[str, Weights], dtype: torch.dtype, in_q8_0: bool = False
) -> dict[str, Tensor | PackedMatrix]:
    """Weights by name, quantised matrices in strips and all others in `dtype`.

    in_q8_0: dense matrices are quantised. What was read of a mapped file is given back. Raises ModelUnsupported where
    this machine has no kernels for it.
    """
    level = widest("pack", dtype)
    if level is None:
        raise ModelUnsupported(f"this machine has no kernels for quantised weights and {dtype}")
    kinds = {name: kind for name, x in weights.items() if (kind := _kind(name, x, in_q8_0))}
    shapes = {name: (weights[name].shape[0], weights[name].shape[1]) for name in kinds}
    sizes = {name: strips_bytes(kind, shapes[name]) for name, kind in kinds.items()}
    memory = _huge(sum(sizes.values()))
    at = 0
    made: dict[str, Tensor | PackedMatrix] = {}
    with console.progress("Packing weights", "matrices") as update:
        for name, x in weights.items():
            if name in kinds:
                blocks = q8_0_blocks(x) if isinstance(x, Tensor) else x.blocks
                strips = memory[at : at + sizes[name]]
                made[name] = packed(level, kinds[name], shapes[name], blocks, strips)
                at += sizes[name]
                _give_back(blocks)
            else:
                made[name] = x.to(dtype, copy=True) if isinstance(x, Tensor) else _dense(level, x, dtype)
            update(len(made), len(weights))
    return made


def packed_bytes(weights: Mapping[str, Weights], dtype: torch.dtype, in_q8_0: bool = False) -> int:
    """Bytes that `pack_weights` takes."""
    total = 0
    for name, x in weights.items():
        kind = _kind(name, x, in_q8_0)
        size = math.prod(x.shape)
        total += strips_bytes(kind, (x.shape[0], x.shape[1])) if kind else size * dtype.itemsize
    return total


def bytes_of(x: Tensor | PackedMatrix) -> int:
    """Bytes of weights in memory."""
    return x.strips.nbytes if isinstance(x, PackedMatrix) else x.nbytes


def _kind(name: str, x: Weights, in_q8_0: bool) -> str:
    """The kind of strips of such weights, "" for those that stay dense."""
    if isinstance(x, QuantisedMatrix):
        return x.kind if x.shape[0] % 2 == 0 else ""  # kernels write words of two outputs
    if not in_q8_0 or x.dim() != 2 or "norm" in name:
        return ""
    outputs, inputs = x.shape
    return "Q8_0" if outputs % 2 == 0 and inputs % UNIT == 0 else ""


def _dense(level: Level, x: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """Quantised weights that kernels do not multiply, in this dtype."""
    made = torch.empty(x.shape, dtype=dtype)
    step = _rows_at_once(x.shape)
    for at in range(0, len(made), step):
        blocks = x.blocks[at : at + step]
        made[at : at + step] = packed(level, x.kind, (len(blocks), x.shape[1]), blocks).numbers()
    return made


def _huge(n_bytes: int) -> Tensor:
    """Memory in large pages, where the system has some: a strip is read once a step.

    It is private: Linux gives shared memory no large pages unless it is told to.
    """
    memory = mmap.mmap(-1, n_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + n_bytes]


def _give_back(blocks: Any) -> None:
    """Drop the pages of the mapped file that an array is a view of."""
    while isinstance(blocks, np.ndarray):
        blocks = blocks.base
    owner = blocks.obj if isinstance(blocks, memoryview) else blocks
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)


def number_blocks(x: PackedMatrix) -> Iterator[Tensor]:
    """The weights in their dtype, some rows at a time."""
    step = _rows_at_once(x.shape)
    for at in range(0, x.shape[0], step):
        yield take(x, torch.arange(at, min(at + step, x.shape[0])))


def _rows_at_once(shape: tuple[int, int]) -> int:
    return max(1, NUMBERS // shape[1])


@torch.inference_mode()
def packed_reference(
    config: Any, tensors: Mapping[str, Tensor | PackedMatrix], dtype: torch.dtype
) -> nn.Module:
    """transformers' own model over packed weights, which its linear layers and embeddings call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = AutoConfig.for_model(**config.to_dict())
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(own, dtype=dtype)
    for name, module in model.named_modules():
        weight = tensors.get(f"{name}.weight")
        if hasattr(module, "scalar_embed_scale"):  # Gemma's embeddings
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
        if isinstance(weight, PackedMatrix):
            _call_packed(module, weight, cast("Tensor | None", tensors.get(f"{name}.bias")))
        elif "rotary_emb" in name:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], type(module)(config=own))
    dense = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    model.load_state_dict(dense, strict=False, assign=True)
    return cast(nn.Module, model.eval())


def _call_packed(module: Any, weight: PackedMatrix, bias: Tensor | None) -> None:
    scale = getattr(module, "embed_scale", None)
    is_embedding = isinstance(module, nn.Embedding)
    module.weight = None
    if is_embedding:

        def embed(ids: Tensor) -> Tensor:
            found = take(weight, ids.flatten()).view(*ids.shape, -1)
            return found if scale is None else found * scale.to(found.dtype)

        module.forward = embed
        return
    linear = Linear(weight, bias)
    module.forward = lambda x: linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
