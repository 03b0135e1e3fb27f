"""An operation and its backends: which backend serves a kind of call. ops.py has the table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.kernels import autotune, switches
from blendserve.kernels.norm import Norm
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec, CorrectionParams, Rope

P = ParamSpec("P")
R = TypeVar("R")

PLAIN = "plain torch"
_lock = Lock()  # of all operations: measurements at the same time would disturb each other


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute an operation. All of its functions get the arguments of the operation."""

    name: str
    run: Callable[..., Any]
    supports: Callable[..., bool] = lambda *_: True  # dtypes, sizes, strides and options
    unavailable_reason: Callable[..., str] = lambda *_: ""  # on this machine; "" = it may serve


class KernelOp(Generic[P, R]):
    """An operation: its plain form in torch, which supports everything, and the backends that serve in its place.

    The first backend of the table that may serve does; on a CPU the fastest, where `rows` gives the kind of rows to
    measure (autotune.py). The first call of a kind selects: later ones look the backend up.
    """

    def __init__(
        self, plain: Callable[P, R], *backends: Backend, rows: Callable[..., str] | None = None,
        validate: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        """rows: of a call's arguments, "" = the first in the table. validate: raises ValueError for wrong arguments."""
        self.name, self.backends = plain.__name__, (*backends, Backend(PLAIN, plain))
        self.__doc__, self._rows, self._validate = plain.__doc__, rows, validate
        self.bound: dict[Hashable, Backend] = {}  # by kind of call
        self.order: dict[Hashable, list[Backend]] = {}  # by kind of rows: the fastest first

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._validate:
            self._validate(*args)
        out: R = self.select(*args, **kwargs).run(*args, **kwargs)
        return out

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Backend:
        """The backend of such calls."""
        rows = self._rows(*args) if self._rows else ""
        kind = rows, torch.get_num_threads(), torch.is_grad_enabled(), *map(_kind, args)
        found = self.bound.get(kind)
        if found is None:
            with _lock:
                found = self.bound[kind] = self._select(rows, *args, **kwargs)
        return found

    def _select(self, rows: str, *args: Any, **kwargs: Any) -> Backend:
        backends: Sequence[Backend] = self.backends
        if rows and switches.is_autotune_on():
            about = rows, args[0].dtype, torch.get_num_threads()
            if about not in self.order:
                self.order[about] = autotune.fastest_first(self.name, rows, args[0].dtype, self.backends)
            backends = self.order[about]
        able = (backend for backend in backends if backend.supports(*args, **kwargs))
        return next(backend for backend in able if not backend.unavailable_reason(*args, **kwargs))


def _kind(x: Any) -> Hashable:
    """What the backends' `supports` may read of one argument."""
    if isinstance(x, Tensor):
        heads = x.shape[0] if x.dim() == 3 else None  # of queries, keys and values
        return x.dtype, x.device, x.dim(), heads, x.shape[-1], x.stride(-1), x.requires_grad
    if isinstance(x, AttentionPlan):
        hides_none = x.is_contiguous and x.window is not None and x.window >= x.kv_len
        return x.is_contiguous, hides_none, len(x.positions) > 0
    if isinstance(x, Norm):
        return x.form, _kind(x.weight)
    if isinstance(x, Rope):
        return _kind(x.cos), _kind(x.sin), x.cos.stride(0) == x.sin.stride(0)
    if callable(x):  # an activation
        return x is F.silu
    if isinstance(x, CorrectionParams):
        return x.penalty is None
    if type(x) in (list, tuple):  # stored chunks
        return frozenset(map(_kind, x))
    if isinstance(x, AttentionSpec):
        return x, x.sinks is not None
    return x if isinstance(x, (Rotary, type(None))) else None
