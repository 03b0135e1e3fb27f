"""The rows of a prefill: where they stand, and how attention may cut them into blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_BLOCK = 96  # rows; larger blocks waste work beyond the diagonal, smaller ones fill the matmul badly
SCORE_BUDGET = (
    2**22
)  # elements of one kv head's scores in a block, [g * B, n]: what bounds memory at long contexts


@dataclass(frozen=True, slots=True)
class Rows:
    """The active rows of a prefill, by position, ascending: in this machine's own memory and on the device.

    What depends on them here need not wait for a GPU; on a CPU both are one.
    """

    host: Tensor  # [S] int64
    device: Tensor  # [S] int64

    @classmethod
    def on(cls, device: torch.device, host: Tensor) -> Rows:
        return cls(host, host.to(device))

    @property
    def last(self) -> Rows:
        """The last one alone."""
        return Rows(self.host[-1:], self.device[-1:])

    def __len__(self) -> int:
        return len(self.host)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) that attend to keys [lo, hi) together; `mask` [B, hi - masked_from] hides what is not theirs."""

    start: int
    stop: int
    lo: int
    hi: int
    masked_from: int
    mask: Tensor | None  # True = hidden


@dataclass(frozen=True)
class RowPlan:
    """The rows of a prefill: made once, used by every layer with the same window.

    known: the positions in this machine's own memory, where the caller has them: reading them from a GPU would wait for
    everything that it has still to do. Kernels that run there do without; None = nobody has them yet.
    absent: keys that no row may see, as nothing was computed for them; only `attend_with_scores` takes such.
    """

    positions: Tensor  # [S] int64, ascending, on the device of the queries
    group: int  # query heads a kv head, H / K
    window: int | None
    known: Tensor | None = None  # [S] int64
    absent: Tensor | None = None  # [T] bool

    @cached_property
    def host(self) -> Tensor:
        """The positions in this machine's own memory; waits for the device where nobody knew them."""
        return self.positions.cpu() if self.known is None else self.known

    @cached_property
    def end(self) -> int:
        """How many keys the last row sees."""
        return int(self.host[-1]) + 1 if len(self.host) else 0

    @cached_property
    def dense(self) -> bool:
        """Whether the rows are known to stand side by side, so that "causal" says it all."""
        return (
            self.known is not None
            and bool(len(self.known))
            and self.end - int(self.known[0]) == len(self.known)
        )

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """How the plain form cuts them; a compiled kernel has its own way, and these are not made for it."""
        at: list[int] = self.host.tolist()
        blocks, start = [], 0
        while start < len(at):
            size = max(1, min(MAX_BLOCK, SCORE_BUDGET // (self.group * (at[start] + 1))))
            stop = min(start + size, len(at))
            blocks.append(_block(self.positions, start, stop, at[start], at[stop - 1], self.window))
            start = stop
        return tuple(blocks)

    @cached_property
    def hidden(self) -> Tensor:
        """[S, T - from], True where a row must not look: later keys, absent ones, and those out of its window.

        Only the last columns are given where nothing before them is hidden from anybody. Needs `absent`.
        """
        assert self.absent is not None
        key, row = torch.arange(len(self.absent)), self.host[:, None]
        hide = self.absent[None] | (key[None] > row)
        if self.window is not None:
            hide |= key[None] <= row - self.window
        seen_by_all = int((~hide.any(dim=0)).long().cumprod(0).sum())
        return hide[:, seen_by_all:].to(self.positions.device)


def plan_rows(
    positions: Tensor,
    group: int,
    window: int | None = None,
    known: Tensor | None = None,
    absent: Tensor | None = None,
) -> RowPlan:
    """The plan for rows at ascending `positions` [S]; group: query heads a kv head, H / K; the rest: see RowPlan."""
    if known is None and positions.device.type == "cpu":
        known = positions
    return RowPlan(positions, group, window, known, absent)


def plans_by_window(rows: Rows, group: int, windows: Iterable[int | None]) -> dict[int | None, RowPlan]:
    """One plan for each window that a reader's layers have."""
    return {window: plan_rows(rows.device, group, window, rows.host) for window in set(windows)}


def _block(positions: Tensor, start: int, stop: int, first: int, last: int, window: int | None) -> Block:
    lo = 0 if window is None else max(0, first - window + 1)
    masked_from = first + 1 if window is None or last < window else lo
    if masked_from > last:
        return Block(start, stop, lo, last + 1, masked_from, None)
    row = positions[start:stop, None]
    key = torch.arange(masked_from, last + 1, device=positions.device)[None]
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    return Block(start, stop, lo, last + 1, masked_from, hidden)
