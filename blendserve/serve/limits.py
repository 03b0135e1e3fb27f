"""How much a tenant may ask: requests at a time, and requests a minute (a token bucket). Used by the event loop alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from blendserve.errors import Busy
from blendserve.serve.keys import Tenant
from blendserve.timing import Clock


class Limits:
    """Counts for every tenant."""

    def __init__(self, max_concurrent: int, max_per_minute: int) -> None:
        self._concurrent, self._per_minute = max_concurrent, max_per_minute
        self._active: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, Clock]] = {}  # requests left, and since when

    def pay(self, tenant: Tenant) -> None:
        """Count a request. Raises Busy when the tenant has had as many as they may."""
        rate = tenant.max_per_minute or self._per_minute
        left, since = self._buckets.get(tenant.name, (float(rate), Clock()))
        left = min(float(rate), left + since.elapsed() * rate / 60)
        if left < 1:
            wait = math.ceil((1 - left) * 60 / rate)
            raise Busy(f"this API key may send {rate} requests a minute", wait)
        self._buckets[tenant.name] = (left - 1, Clock())

    @contextmanager
    def one(self, tenant: Tenant) -> Iterator[None]:
        """A request, while it lasts. Raises Busy when the tenant has too many already."""
        most = tenant.max_concurrent or self._concurrent
        if self._active[tenant.name] >= most:
            raise Busy(f"this API key may have {most} requests at a time", 1)
        self._active[tenant.name] += 1
        try:
            yield
        finally:
            self._active[tenant.name] -= 1
            if not self._active[tenant.name]:
                del self._active[tenant.name]
