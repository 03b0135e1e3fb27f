"""What tests ask of the workers of tensor parallelism, which are processes of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from blendserve.errors import StoreUnavailable


class WorkerProbe:
    """Methods that vLLM adds to its worker (`worker_extension_cls`)."""

    def blend_rows(self) -> list[int]:
        """Positions that the last job ran."""
        rows: list[int] = _runner().rows.tolist()
        return rows

    def break_store(self, rank: int) -> None:
        """The store of one rank cannot be read from now on; -1 repairs it."""
        fetcher = _runner().records.fetcher
        vars(fetcher.local).pop("snapshot", None)
        if _runner().ranks.rank == rank:

            def broken() -> AbstractContextManager[Any]:
                raise StoreUnavailable("gone")

            fetcher.local.snapshot = broken


def _runner() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().queue.runner
