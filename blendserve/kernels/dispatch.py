"""An operation and its backends: which backend serves a kind of call. ops.py has the table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from blendserve.kernels import autotune, switches

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
    measure (autotune.py). Every call asks `supports`, with the arguments that the backend will get: a choice that is
    kept from one call to the next needs a key of all that any backend reads, and costs as much.
    """

    def __init__(
        self, plain: Callable[P, R], *backends: Backend, rows: Callable[..., str] | None = None,
        validate: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        """rows: of a call's arguments, "" = the first in the table. validate: raises ValueError for wrong arguments."""
        self.name = plain.__name__
        self.backends = (*backends, Backend(PLAIN, plain))
        self.__doc__ = plain.__doc__
        self._rows = rows
        self._validate = validate
        self.order: dict[Hashable, list[Backend]] = {}  # by kind of rows: the fastest first

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._validate:
            self._validate(*args)
        out: R = self.select(*args, **kwargs).run(*args, **kwargs)
        return out

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Backend:
        """The backend of such calls."""
        rows = self._rows(*args) if self._rows else ""
        backends = self._fastest_first(rows, args) if rows and switches.is_autotune_on() else self.backends
        able = (backend for backend in backends if backend.supports(*args, **kwargs))
        return next(backend for backend in able if not backend.unavailable_reason(*args, **kwargs))

    def _fastest_first(self, rows: str, args: Any) -> Sequence[Backend]:
        kind = rows, args[0].dtype, torch.get_num_threads()
        found = self.order.get(kind)
        if found is None:
            with _lock:
                if kind not in self.order:
                    self.order[kind] = autotune.fastest_first(self.name, rows, args[0].dtype, self.backends)
                found = self.order[kind]
        return found
