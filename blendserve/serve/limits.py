"""Limits per tenant: concurrent requests, requests per minute and body bytes per second.

Used by the event loop only.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blendserve.errors import RateLimited
from blendserve.serve.keys import Tenant

BYTES_PER_S = 8 << 20  # of one tenant's bodies: parsing them takes a tenth of the event loop's time
BURST_BYTES = 256 << 10  # accepted without a wait
MAX_TENANTS = 10_000  # remembered; only a server without keys, where each address is a tenant, has more


class TokenBucket:
    """A token bucket for each tenant: tokens that the tenant has used, less those refilled since.

    Of more than MAX_TENANTS tenants, the one idle for longest is forgotten.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._used: dict[str, tuple[float, float]] = {}  # tenant -> used tokens, and the time of this count

    def use(self, tenant: str, n: float, per_s: float) -> None:
        """Use `n` tokens of a bucket that is refilled by `per_s` a second."""
        used = self._in_use(tenant, per_s) + n
        self._used.pop(tenant, None)
        self._used[tenant] = used, self._now()
        if len(self._used) > MAX_TENANTS:
            del self._used[next(iter(self._used))]

    def wait_s(self, tenant: str, limit: float, per_s: float) -> float:
        """Seconds until at most `limit` tokens are in use."""
        return max(0.0, self._in_use(tenant, per_s) - limit) / per_s

    def _in_use(self, tenant: str, per_s: float) -> float:
        used, since = self._used.get(tenant, (0.0, 0.0))
        return max(0.0, used - (self._now() - since) * per_s)


class Limits:
    """The limits and counters of all tenants. A tenant's own limits replace the server's."""

    def __init__(
        self, max_concurrent: int, max_per_minute: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_concurrent, self._max_per_minute = max_concurrent, max_per_minute
        self._running: Counter[str] = Counter()
        self._uploading: Counter[str] = Counter()
        self._requests, self._body_bytes = TokenBucket(now), TokenBucket(now)

    def take_request(self, tenant: Tenant) -> None:
        """Count a request. Raises RateLimited above the tenant's rate."""
        rate = tenant.max_per_minute or self._max_per_minute
        if wait_s := self._requests.wait_s(tenant.name, rate - 1, rate / 60):
            raise RateLimited(f"rate limit of {rate} requests per minute", math.ceil(wait_s))
        self._requests.use(tenant.name, 1, rate / 60)

    def throttle(self, tenant: Tenant, n_bytes: int) -> float:
        """Count bytes of a body -> seconds to wait before the next ones are read."""
        self._body_bytes.use(tenant.name, n_bytes, BYTES_PER_S)
        return self._body_bytes.wait_s(tenant.name, BURST_BYTES, BYTES_PER_S)

    @contextmanager
    def concurrency_slot(self, tenant: Tenant, upload: bool = False) -> Iterator[None]:
        """Count a running request, or the upload of its body. Raises RateLimited if the tenant has too many."""
        limit = tenant.max_concurrent or self._max_concurrent
        n_uploads = self._uploading[tenant.name] if upload else 0
        if self._running[tenant.name] + n_uploads >= limit:
            raise RateLimited(f"limit of {limit} concurrent requests", 1)
        with counted(self._uploading if upload else self._running, tenant.name):
            yield


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
