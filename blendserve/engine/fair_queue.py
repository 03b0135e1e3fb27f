"""Requests that wait for a slot: first come, first served for each tenant, and tenants take turns.

So however much one tenant sends, another's next request waits for at most one request of each other tenant.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from blendserve.engine.queued import Work


class Waiting:
    """The queue. Not locked: the scheduler's lock guards it."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Work]] = OrderedDict()  # the tenant whose turn it is first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def put(self, work: Work) -> None:
        """Put it at the end of its tenant's line."""
        self._lines.setdefault(work.tenant, deque()).append(work)

    def pop(self) -> Work | None:
        """The next one; its tenant goes to the back."""
        if not self._lines:
            return None
        tenant, line = self._lines.popitem(last=False)
        work = line.popleft()
        if line:
            self._lines[tenant] = line
        return work

    def remove(self, work: Work) -> bool:
        """Whether it was still waiting."""
        line = self._lines.get(work.tenant)
        if line is None or work not in line:
            return False
        line.remove(work)
        if not line:
            del self._lines[work.tenant]
        return True

    def all(self) -> list[Work]:
        """Everything that waits."""
        return [work for line in self._lines.values() for work in line]
