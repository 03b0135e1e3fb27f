"""How much a tenant may ask: at a time, a minute (a token bucket), and bytes a second. Used by the event loop alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from blendserve.errors import Busy
from blendserve.serve.keys import Tenant
from blendserve.timing import Clock

BYTES_PER_S = (
    8 << 20
)  # of one tenant's bodies: parsing those keeps the event loop busy for a tenth of its time
BURST_BYTES = 256 << 10  # that come without waiting
REMEMBERED = 10_000  # tenants; there are that many only where addresses count as such


class Limits:
    """Counts for every tenant."""

    def __init__(self, max_concurrent: int, max_per_minute: int) -> None:
        self._concurrent, self._per_minute = max_concurrent, max_per_minute
        self._active: Counter[str] = Counter()
        self._reading: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, Clock]] = {}  # requests left, and since when
        self._bytes: dict[str, tuple[float, Clock]] = {}  # that count as not taken yet, and since when

    def pay(self, tenant: Tenant) -> None:
        """Count a request. Raises Busy when the tenant has had as many as they may."""
        rate = tenant.max_per_minute or self._per_minute
        left, since = self._buckets.get(tenant.name, (float(rate), Clock()))
        left = min(float(rate), left + since.elapsed() * rate / 60)
        if left < 1:
            wait = math.ceil((1 - left) * 60 / rate)
            raise Busy(f"you may send {rate} requests a minute", wait)
        _remember(self._buckets, tenant.name, left - 1)

    def wait_for_bytes(self, tenant: Tenant, n: int) -> float:
        """Seconds to wait, after so many more bytes of a body, before the next ones are taken."""
        ahead, since = self._bytes.get(tenant.name, (0.0, Clock()))
        ahead = max(0.0, ahead - since.elapsed() * BYTES_PER_S) + n
        _remember(self._bytes, tenant.name, ahead)
        return max(0.0, ahead - BURST_BYTES) / BYTES_PER_S

    @contextmanager
    def reading(self, tenant: Tenant) -> Iterator[None]:
        """While a body is read, which is of no use when the tenant has too many requests already: raises Busy."""
        self._refuse_if_full(tenant, self._active[tenant.name] + self._reading[tenant.name])
        with counted(self._reading, tenant.name):
            yield

    @contextmanager
    def one(self, tenant: Tenant) -> Iterator[None]:
        """A request, while it lasts. Raises Busy when the tenant has too many already."""
        self._refuse_if_full(tenant, self._active[tenant.name])
        with counted(self._active, tenant.name):
            yield

    def _refuse_if_full(self, tenant: Tenant, n: int) -> None:
        most = tenant.max_concurrent or self._concurrent
        if n >= most:
            raise Busy(f"you may have {most} requests at a time", 1)


@contextmanager
def counted(counter: Counter[str], name: str) -> Iterator[None]:
    """One more of them, meanwhile."""
    counter[name] += 1
    try:
        yield
    finally:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]


def _remember(table: dict[str, tuple[float, Clock]], name: str, value: float) -> None:
    """The one that was longest without a request is forgotten where there are very many."""
    table.pop(name, None)
    table[name] = (value, Clock())
    if len(table) > REMEMBERED:
        del table[next(iter(table))]
