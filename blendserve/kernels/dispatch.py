"""An operation and its backends: which backend serves a kind of call. ops.py has the table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from blendserve.kernels import autotune, switches
from blendserve.kernels.activation import Activation
from blendserve.kernels.autotune import Calls, Times
from blendserve.kernels.norm import Norm
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec, CorrectionParams, Prior, RecomputedTokens, Rope

P = ParamSpec("P")
R = TypeVar("R")

_lock = Lock()  # of all bindings: measurements at the same time would disturb each other


def _supports_all(*_: object, **__: object) -> bool:
    return True


def _available(*_: object, **__: object) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Backend(Generic[P, R]):
    """One way to compute an operation. All of its functions get the arguments of the operation."""

    name: str
    run: Callable[P, R]
    supports: Callable[P, bool] = _supports_all  # dtypes, sizes, strides and options
    unavailable_reason: Callable[P, str] = _available  # on this machine; "" = it may serve
    is_native: bool = False  # compiled for this CPU

    def is_usable(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        return self.supports(*args, **kwargs) and not self.unavailable_reason(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Tuning(Generic[P]):
    """How an operation's backends are measured."""

    operation: str
    shape_class: Callable[P, Any]  # the class that a choice serves; None: the first usable backend serves
    calls: Callable[..., Calls]  # of a class


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The measurement of a backend for a class of shapes."""

    operation: str
    shapes: str
    backend: str
    milliseconds: tuple[float, ...]  # of a call of each sample; empty: not measured
    note: str  # "serves", or why it does not

    def cells(self) -> tuple[str, ...]:
        """Backend, time and note, for a table."""
        return self.backend, " | ".join(f"{ms:.3g}" for ms in self.milliseconds), self.note


class KernelOp(Generic[P, R]):
    """An operation of the table. Its last backend is plain torch, which supports everything.

    The first call of a kind selects the backend: later ones look it up.
    """

    def __init__(self, *backends: Backend[P, R], tuning: Tuning[P] | None = None) -> None:
        self.backends, self._tuning = backends, tuning
        self._bound: dict[Hashable, Backend[P, R]] = {}  # by kind of call
        self._order: dict[Hashable, list[Backend[P, R]]] = {}  # by class of shapes: the fastest first
        self._results: dict[Hashable, list[TuningResult]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.select(*args, **kwargs).run(*args, **kwargs)

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Backend[P, R]:
        """The backend of such calls."""
        shapes = self._tuning.shape_class(*args, **kwargs) if self._tuning else None
        kind = shapes, torch.get_num_threads(), torch.is_grad_enabled(), *map(_kind, args)
        found = self._bound.get(kind)
        if found is None:
            with _lock:
                found = self._bound[kind] = self._select(shapes, *args, **kwargs)
        return found

    def tuning_results(self) -> list[TuningResult]:
        """Of all classes of this process's calls."""
        return [result for results in list(self._results.values()) for result in results]

    def forget(self) -> None:
        """Select anew at the next call."""
        for found in (self._bound, self._order, self._results):
            found.clear()

    def _select(self, shapes: Hashable, *args: P.args, **kwargs: P.kwargs) -> Backend[P, R]:
        backends: Sequence[Backend[P, R]] = self.backends
        if shapes is not None and switches.is_autotune_on():
            about = shapes, torch.get_num_threads()
            if about not in self._order:
                self._order[about] = self._tune(about)
            backends = self._order[about]
        return next(backend for backend in backends if backend.is_usable(*args, **kwargs))

    @torch.inference_mode()
    def _tune(self, about: tuple[Hashable, int]) -> list[Backend[P, R]]:
        """The backends in the order of use for a class of shapes, and their times as results."""
        assert self._tuning is not None
        calls, operation, shapes = self._tuning.calls(about[0]), self._tuning.operation, str(about[0])
        call: Any = calls[0][0]
        backends: list[Any] = list(self.backends)
        candidates = [b for b in backends if b.supports(*call)]
        notes = {b.name: b.unavailable_reason(*call) for b in candidates}
        usable = [b for b in candidates if not notes[b.name]]
        times: Times | None = None
        if len(usable) > 1:
            names, native = [b.name for b in usable], [b.name for b in usable if b.is_native]
            times = autotune.times(operation, shapes, {b.name: b.run for b in usable}, calls)
            winner = autotune.choose(times, native) if times else names[0]
            note = "slower" if times else autotune.NOT_TUNED
            notes |= {name: "serves" if name == winner else note for name in names}
            usable.sort(key=lambda b: b.name != winner)
        else:
            notes[usable[0].name] = "serves"
        self._results[about] = [
            TuningResult(operation, shapes, b.name, tuple(1e3 * t for t in (times or {}).get(b.name, ())), notes[b.name])
            for b in candidates
        ]  # fmt: skip
        return [*usable, *(b for b in self.backends if b not in usable)]


def _kind(x: Any) -> Hashable:
    """What the backends' `supports` may read of one argument."""
    if isinstance(x, Tensor):
        heads = x.shape[0] if x.dim() == 3 else None  # of queries, keys and values
        return x.dtype, x.device, x.dim(), heads, x.shape[-1], x.stride(-1), x.requires_grad
    if isinstance(x, AttentionPlan):
        return (
            x.is_contiguous,
            x.is_contiguous and x.window is not None and x.window >= x.kv_len,
            len(x.positions) > 0,
        )
    if isinstance(x, Norm):
        return x.form, _kind(x.weight)
    if isinstance(x, Rope):
        return _kind(x.cos), _kind(x.sin), x.cos.stride(0) == x.sin.stride(0)
    if isinstance(x, Rotary):
        return x.form
    if isinstance(x, Activation):
        return x.is_silu
    if isinstance(x, CorrectionParams):
        return x.penalty is None
    if isinstance(x, (RecomputedTokens, Prior)):
        return None
    if isinstance(x, (list, tuple)):  # stored chunks, a prefix's keys and values
        return frozenset(map(_kind, x))
    return x if isinstance(x, (AttentionSpec, type(None))) else None
