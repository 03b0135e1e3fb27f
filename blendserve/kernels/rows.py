"""The rows of a pass: their positions, and the keys that they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The positions of a pass's rows, ascending, in host memory and on the device: the host never waits for a GPU.

    On a CPU both are one tensor.
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


@dataclass(frozen=True)
class AttentionPlan:
    """The rows of a pass: made once, used by every layer of the same group and window.

    host_positions: positions in host memory. None = they are on a GPU alone: reading them would wait for all work that
    is queued there, and the GPU's kernels do not need it.
    masked_keys: True for keys that no row sees, as they were not computed; for `attend_with_scores` alone.
    """

    positions: Tensor  # [S] int64, ascending, on the device of the queries
    group: int  # query heads per kv head, H / K
    window: int | None
    host_positions: Tensor | None = None  # [S] int64
    masked_keys: Tensor | None = None  # [T] bool

    @cached_property
    def positions_on_host(self) -> Tensor:
        """The positions in host memory; waits for the device where `host_positions` is None."""
        return self.positions.cpu() if self.host_positions is None else self.host_positions

    @cached_property
    def kv_len(self) -> int:
        """Number of keys up to the last row's position."""
        return int(self.positions_on_host[-1]) + 1 if len(self.positions_on_host) else 0

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether positions are consecutive and known on the host: then a causal mask is enough."""
        return (
            self.host_positions is not None
            and bool(len(self.host_positions))
            and self.kv_len - int(self.host_positions[0]) == len(self.host_positions)
        )

    def keys_seen(self, start: int, stop: int) -> slice:
        """The keys from the first one that row `start` sees to the last one that row `stop - 1` sees."""
        first, last = int(self.positions_on_host[start]), int(self.positions_on_host[stop - 1])
        return slice(0 if self.window is None else max(0, first - self.window + 1), last + 1)

    def hidden_keys(self, rows: slice, keys: slice) -> Tensor:
        """[rows, keys], True for keys that a row does not see: later ones, and those before its window."""
        key = torch.arange(keys.start, keys.stop, device=self.positions.device)
        row = self.positions[rows, None]
        hidden = key > row
        if self.window is not None:
            hidden |= key <= row - self.window
        return hidden

    @cached_property
    def hidden(self) -> Tensor:
        """[S, T - from], True for keys that a row does not see, masked ones too. Needs `masked_keys`.

        The first columns are left out where every row sees them.
        """
        assert self.masked_keys is not None
        on_host = AttentionPlan(self.positions_on_host, self.group, self.window)
        hide = on_host.hidden_keys(slice(None), slice(0, len(self.masked_keys))) | self.masked_keys
        seen_by_all = int((~hide.any(dim=0)).long().cumprod(0).sum())
        return hide[:, seen_by_all:].to(self.positions.device)


def plan_rows(
    positions: Tensor, group: int, window: int | None = None, host_positions: Tensor | None = None,
    masked_keys: Tensor | None = None,
) -> AttentionPlan:  # fmt: skip
    """The plan for rows at ascending `positions` [S]; for the other parameters see AttentionPlan."""
    if host_positions is None and positions.device.type == "cpu":
        host_positions = positions
    return AttentionPlan(positions, group, window, host_positions, masked_keys)


def plan_layers(
    rows: Rows, forms: Sequence[tuple[int, int | None]], masked_keys: Tensor | None = None
) -> list[AttentionPlan]:
    """The plan of each layer; layers of one form share it. forms [L]: group and window."""
    plans = {form: plan_rows(rows.device, *form, rows.host, masked_keys) for form in set(forms)}
    return [plans[form] for form in forms]
