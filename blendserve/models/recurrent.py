"""Recurrent layers of hybrid models: transformers' own mixer, over states that are kept, moved and composed.

A layer's state S [H, N, M] changes with every token by an affine map, so a chunk's tokens are one such map:

    S behind = A S before + B     A is a matrix of each head (gated delta nets), or a number of each head (Mamba-2)

Beside it stand the last inputs of a short convolution. A chunk keeps A, B and these inputs, whatever its length. Composed
over the chunks of a prompt they give the state behind it, as in HYPIC (arXiv 2607.01299). The composition is exact for
given inputs of the layer. The inputs of upper layers depend on what stands before a chunk, as reused KV does.

The convolution reads across a chunk's beginning: even in layer 0, what the first tokens contribute depends on the tokens
before them. So the map covers the tokens from SEAM on, and every prompt computes the first SEAM tokens of each chunk.

A layer that is an MLP alone (Nemotron-H) is one with an empty state: a chunk keeps one row of zeros of it.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from blendserve.errors import ModelUnsupported
from blendserve.kv import KVShape

SEAM = 16  # tokens; at least a convolution's taps less one
ARGUMENTS = "cache_params", "past_key_values", "cache"  # names that modules have for their cache


class RecurrentState(NamedTuple):
    """What a layer keeps of all tokens before."""

    memory: Tensor  # [H, N, M] in fp32; N is 0 in a layer that is a convolution alone
    inputs: Tensor  # [F, taps - 1], the last ones of the convolution


class RecurrentMixer:
    """One layer's mixer. A state map is a pair of tensors [H, R, .], as a layer's keys and values are:

    keys      A [H, N, N], or in each row a head's number [H, N, 1]
    values    B [H, N, M], and below it the convolution's inputs, filled up with zeros
    """

    def __init__(self, module: Any, is_matrix: bool, hidden: Tensor) -> None:
        """module: called as it is. hidden [1, E]: any row, which tells the state's shape.

        Raises ModelUnsupported where transformers is older than the calls that `_Slot` answers.
        """
        import transformers

        if not hasattr(transformers.Cache, "get_conv_state"):
            raise ModelUnsupported(
                "a model with recurrent layers needs transformers 5.23 or newer and Python 3.11 or newer; this is "
                f"transformers {transformers.__version__}: upgrade it, or choose a model with attention alone"
            )
        self._module = module
        self._is_matrix = is_matrix
        arguments = signature(module.forward).parameters
        self._argument = next((name for name in ARGUMENTS if name in arguments), None)  # None: an MLP alone
        slot = _Slot(None)
        slot.inputs = hidden[None, :, :0]
        self._call(hidden[None], slot)
        self.has_state = self._argument is not None
        inputs = slot.inputs[0]
        memory = inputs.new_zeros(1, 0, len(inputs)) if slot.memory is None else slot.memory[0]
        self.empty = RecurrentState(torch.zeros_like(memory), torch.zeros_like(inputs))
        heads, self._rows, width = memory.shape
        below = -(-inputs.numel() // (heads * width))
        dim = self._rows if is_matrix and self._rows else 1
        self.shape = KVShape(heads, dim, width)
        self.n_rows = max(1, self._rows + below)  # of a state map, R

    def run(self, x: Tensor, before: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Normed rows [S, E] behind a state -> what the layer adds to them [S, E], and the state behind them."""
        if not len(x):
            return x, before
        out, (after,) = self._run(x, [before])
        return out, after

    def run_chunk(self, x: Tensor, before: RecurrentState) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """A chunk's rows [C, E] -> what the layer adds to them, and their state map; zeros for SEAM tokens or fewer."""
        if len(x) <= SEAM or not before.memory.numel():
            out, state = self.run(x, before)
            return out, self.packed(state)
        out, state = self.run(x[:SEAM], before)
        heads, n, width = state.memory.shape
        probes = [state, state._replace(memory=torch.zeros_like(state.memory))]
        ones = [torch.ones_like(state.memory)]
        if self._is_matrix:  # the identity, as many of its columns at a time as a state has
            columns = torch.split(torch.eye(n, device=x.device), width, dim=1)
            ones = [pad(part, (0, width - part.shape[1])).expand(heads, -1, -1) for part in columns]
        probes += [state._replace(memory=one) for one in ones]
        more, (_, without, *with_one) = self._run(x[SEAM:], probes)
        factor = torch.cat([probe.memory - without.memory for probe in with_one], dim=-1)
        return torch.cat([out, more]), self.packed(without, factor[..., : self.shape.dim])

    def packed(self, state: RecurrentState, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The state map A S + B of a factor A and a state B. Without one A is 0: the state whatever stands before."""
        heads, dim, width = self.shape
        keys, values = (state.inputs.new_zeros(heads, self.n_rows, d) for d in (dim, width))
        if factor is not None:
            keys[:, : self._rows] = factor
        values[:, : self._rows] = state.memory
        below = state.inputs.new_zeros(heads * (self.n_rows - self._rows) * width)
        below[: state.inputs.numel()] = state.inputs.flatten()
        values[:, self._rows :] = below.view(heads, -1, width)
        return keys, values

    def after(self, before: RecurrentState, keys: Tensor, values: Tensor) -> RecurrentState:
        """The state behind the tokens of a state map."""
        factor, memory = (x[:, : self._rows].float() for x in (keys, values))
        moved = factor @ before.memory if self._is_matrix else factor * before.memory
        inputs = values[:, self._rows :].reshape(-1)[: before.inputs.numel()].view(before.inputs.shape)
        return RecurrentState((moved + memory).to(before.memory.dtype), inputs)

    def _run(self, x: Tensor, before: list[RecurrentState]) -> tuple[Tensor, list[RecurrentState]]:
        """Rows [S, E] behind each of some states -> what the layer adds behind the first one, and the states behind."""
        slot = _Slot(RecurrentState(*map(torch.stack, zip(*before, strict=True))))
        out = self._call(x.expand(len(before), -1, -1), slot)
        memory = torch.stack([state.memory for state in before]) if slot.memory is None else slot.memory
        return out[0], [RecurrentState(*each) for each in zip(memory, slot.inputs, strict=True)]

    def _call(self, x: Tensor, slot: _Slot) -> Tensor:
        """Rows [B, S, E] behind the states of a slot -> what the layer adds to them, [B, S, E]."""
        out = self._module(x, **({self._argument: slot} if self._argument else {}))
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)


class _Slot:
    """The cache of one layer and some requests B, by the calls that transformers' mixers make."""

    inputs: Tensor  # [B, F, taps - 1]
    memory: Tensor | None  # [B, H, N, M]

    def __init__(self, before: RecurrentState | None) -> None:
        """before: with a dim B in front."""
        self._is_empty = before is None
        self.memory = None
        if before is not None:
            self.inputs = before.inputs
            self.memory = before.memory if before.memory.numel() else None

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | None:
        return None if self._is_empty else self.inputs

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        return self.memory

    def is_recording_past(self, *_: Any) -> bool:
        return True  # so that a single token takes the way of several, which changes nothing in place

    def update_conv_state(self, x: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
        n = conv_kernel_size - 1
        before = x.new_zeros(*x.shape[:2], n) if self._is_empty else self.inputs.to(x.dtype)
        joined = torch.cat([before, x], dim=-1)
        self.inputs = joined[..., -n:]
        return joined

    def update_recurrent_state(self, memory: Tensor, *_: Any, **__: Any) -> None:
        self.memory = memory
