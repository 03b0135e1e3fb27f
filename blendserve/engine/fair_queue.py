"""What waits for its turn: first come, first served for each tenant, and tenants take turns.

So however much one tenant sends, what another one sends next waits for at most one thing of each other tenant.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    """Something that somebody waits for."""

    @property
    def tenant(self) -> str: ...


T = TypeVar("T", bound=Owned)


class FairQueue(Generic[T]):
    """The queue. Not locked: whoever owns it does that."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()  # the tenant whose turn it is first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def of(self, tenant: str) -> int:
        """How much one tenant has waiting."""
        return len(self._lines.get(tenant, ()))

    def put(self, item: T) -> None:
        """Put it at the end of its tenant's line."""
        self._lines.setdefault(item.tenant, deque()).append(item)

    def pop(self, wanted: Callable[[T], bool] = lambda _: True) -> T | None:
        """The first of the first line whose first is wanted; its tenant goes to the back."""
        item = next((line[0] for line in self._lines.values() if wanted(line[0])), None)
        if item is not None:
            self._lines.move_to_end(item.tenant)
            self.remove(item)
        return item

    def remove(self, item: T) -> bool:
        """Whether it was still waiting."""
        line = self._lines.get(item.tenant)
        if line is None or item not in line:
            return False
        line.remove(item)
        if not line:
            del self._lines[item.tenant]
        return True

    def all(self) -> list[T]:
        """Everything that waits."""
        return [item for line in self._lines.values() for item in line]
