"""What tests of kernels switch: threads, compiled kernels, the choice of backends, and memory that is watched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from blendserve.kernels import autotune, ops, switches
from blendserve.kernels.cases import NAN
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.models.model import DecoderModel


@contextmanager
def guarded() -> Iterator[None]:
    """Inside, memory that is asked of torch.empty holds NaN, and what lies around it must stay as it is."""
    plain, made = torch.empty, list[tuple[Tensor, int]]()

    def empty(*shape: Any, **options: Any) -> Tensor:
        size = torch.Size(shape if not shape or isinstance(shape[0], int) else shape[0])
        whole = plain(size.numel() + 128, **options)
        whole.fill_(NAN if whole.is_floating_point() else 77)
        made.append((whole, size.numel()))
        return whole[64 : 64 + size.numel()].view(size)

    with patch.object(torch, "empty", empty):
        yield
    for whole, n in made:
        around = torch.cat([whole[:64], whole[64 + n :]])
        assert bool((around.isnan() if around.is_floating_point() else around == 77).all())


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def forget() -> None:
    """Read the switches, select backends and measure anew at the next call, as a new process does."""
    switches.is_native_on.cache_clear()
    switches.is_autotune_on.cache_clear()
    for kept in (autotune.FOUND, autotune.SPENT_S):
        kept.clear()
    for operation in ops.OPERATIONS.values():
        operation.order.clear()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Torch in the place of compiled kernels, as a process has it that starts with the switch."""
    with patch.dict(os.environ, {switches.NATIVE: "0"}):
        forget()
        yield
    forget()


@contextmanager
def loop_over_kernels_of_steps(model: DecoderModel) -> Iterator[None]:
    """The layer loop over the kernels that decoding steps run, also where the CPU has AMX, which has no steps.

    Linear layers and attention sum in another order there; all other kernels have the same source for each set.
    """
    others = {f"{level.title} kernel" for level in LEVELS.values() if "decode_step" not in level.sources}
    with ExitStack() as patches:
        for operation in (ops.linear, ops.attend):
            left = [backend for backend in operation.backends if backend.name not in others]
            patches.enter_context(patch.object(operation, "backends", left))
        patches.enter_context(patch.dict(model.native_layers, clear=True))
        yield
