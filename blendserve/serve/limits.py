"""Limits per tenant: concurrent requests, requests per minute and body bytes per second (token buckets).

Used by the event loop only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from blendserve.errors import Busy
from blendserve.serve.keys import Tenant
from blendserve.timing import Clock

BYTES_PER_S = 8 << 20  # of one tenant's bodies: parsing them takes a tenth of the event loop's time
BURST_BYTES = 256 << 10  # accepted without a wait
REMEMBERED = 10_000  # tenants; only a server without keys, where addresses are tenants, has more


class Limits:
    """The counters of all tenants."""

    def __init__(self, max_concurrent: int, max_per_minute: int) -> None:
        self._concurrent, self._per_minute = max_concurrent, max_per_minute
        self._active: Counter[str] = Counter()
        self._reading: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, Clock]] = {}  # remaining requests, and their time
        self._bytes: dict[str, tuple[float, Clock]] = {}  # received ahead of the rate, and their time

    def pay(self, tenant: Tenant) -> None:
        """Count a request. Raises Busy above the tenant's rate."""
        rate = tenant.max_per_minute or self._per_minute
        left, since = self._buckets.get(tenant.name, (float(rate), Clock()))
        left = min(float(rate), left + since.elapsed() * rate / 60)
        if left < 1:
            wait = math.ceil((1 - left) * 60 / rate)
            raise Busy(f"rate limit of {rate} requests per minute", wait)
        _remember(self._buckets, tenant.name, left - 1)

    def wait_for_bytes(self, tenant: Tenant, n: int) -> float:
        """Seconds to wait, after `n` more bytes of a body, before the next ones are read."""
        ahead, since = self._bytes.get(tenant.name, (0.0, Clock()))
        ahead = max(0.0, ahead - since.elapsed() * BYTES_PER_S) + n
        _remember(self._bytes, tenant.name, ahead)
        return max(0.0, ahead - BURST_BYTES) / BYTES_PER_S

    @contextmanager
    def reading(self, tenant: Tenant) -> Iterator[None]:
        """Count a body that is being read. Raises Busy if the tenant already has too many requests."""
        self._refuse_if_full(tenant, self._active[tenant.name] + self._reading[tenant.name])
        with counted(self._reading, tenant.name):
            yield

    @contextmanager
    def one(self, tenant: Tenant) -> Iterator[None]:
        """Count a running request. Raises Busy if the tenant already has too many."""
        self._refuse_if_full(tenant, self._active[tenant.name])
        with counted(self._active, tenant.name):
            yield

    def _refuse_if_full(self, tenant: Tenant, n: int) -> None:
        most = tenant.max_concurrent or self._concurrent
        if n >= most:
            raise Busy(f"limit of {most} concurrent requests", 1)


@contextmanager
def counted(counter: Counter[str], name: str) -> Iterator[None]:
    """Count one more inside the block."""
    counter[name] += 1
    try:
        yield
    finally:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]


def _remember(table: dict[str, tuple[float, Clock]], name: str, value: float) -> None:
    """Set a value; of more than REMEMBERED tenants, drop the one idle for longest."""
    table.pop(name, None)
    table[name] = (value, Clock())
    if len(table) > REMEMBERED:
        del table[next(iter(table))]
