"""Requests that wait for a slot: first come, first served for each tenant, and tenants take turns.

So however much one tenant sends, another's next request waits for at most one request of each other tenant.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from blendserve.engine.queued import QueuedRequest


class FairQueue:
    """The queue. Not locked: the scheduler's lock guards it."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[QueuedRequest]] = (
            OrderedDict()
        )  # the tenant whose turn it is first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def put(self, request: QueuedRequest) -> None:
        """Put it at the end of its tenant's line."""
        self._lines.setdefault(request.tenant, deque()).append(request)

    def pop(self) -> QueuedRequest | None:
        """The next one; its tenant goes to the back."""
        if not self._lines:
            return None
        tenant, line = self._lines.popitem(last=False)
        request = line.popleft()
        if line:
            self._lines[tenant] = line
        return request

    def remove(self, request: QueuedRequest) -> bool:
        """Whether it was still waiting."""
        line = self._lines.get(request.tenant)
        if line is None or request not in line:
            return False
        line.remove(request)
        if not line:
            del self._lines[request.tenant]
        return True

    def all(self) -> list[QueuedRequest]:
        """Everything that waits."""
        return [request for line in self._lines.values() for request in line]
