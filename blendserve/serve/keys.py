"""API keys, and the limits of their tenants. A tenant has a namespace and collections. Files hold hashes, never keys.

Created keys are long and random, so a plain SHA-256 cannot be inverted. A key is compared with every entry in constant
time: neither the time nor the position of an entry leaks anything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from blendserve.config import HttpConfig
from blendserve.core import PassageFilter
from blendserve.errors import ConfigError, NotAuthenticated, PermissionDenied, RateLimited

BYTES_PER_S = 8 << 20  # of one tenant's bodies: parsing them takes a tenth of the event loop's time
BURST_BYTES = 256 << 10  # accepted without a wait
LOCK_S = 10.0  # for another process that changes the key file
MAX_TENANTS = 10_000  # remembered; only a server without keys, where each address is a tenant, has more

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of an API key and its rights. None in collections = all; None in a limit = the server's."""

    name: str
    namespace: str = ""
    collections: tuple[str, ...] | None = None
    read_only: bool = False  # may not change documents, pins or stored KV, except by asking
    admin: bool = False  # may read /metrics, which covers all tenants, and pin without a quota
    max_concurrent: int | None = None
    max_per_minute: int | None = None
    tags: tuple[str, ...] | None = None  # may read only documents with one of these, and change none

    @property
    def selection(self) -> PassageFilter:
        """Return the filter of documents that the tenant may read."""
        return PassageFilter(tags=self.tags)

    def may_use(self, collection: str) -> bool:
        """Whether the key covers a collection."""
        return self.collections is None or collection in self.collections

    def require_write_access(self) -> None:
        """Raise PermissionDenied for a key that may only read."""
        if self.read_only or self.tags is not None:
            raise PermissionDenied("this API key is read-only: use a key with write access")


Entries = dict[str, Tenant]
"""SHA-256 of a key -> its tenant."""


class KeyFile:
    """A file of keys: {"keys": [{"sha256": ..., and the fields of Tenant}, ...]}."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Entries:
        """Return the entries; a missing file has none. Raises ConfigError."""
        try:
            keys = json.loads(self.path.read_text())["keys"] if self.path.exists() else []
            for key in keys:
                for name in ("collections", "tags"):
                    key[name] = None if key.get(name) is None else tuple(key[name])
            return {str(key.pop("sha256")): Tenant(**key) for key in keys}
        except (OSError, ValueError, KeyError, TypeError):
            message = f"key file {self.path} cannot be read: restore it, or delete it and create new keys"
            raise ConfigError(message, path=self.path) from None

    def create(self, tenant: Tenant) -> str:
        """Add a key -> the key itself, which is stored nowhere. Raises ConfigError if the name has one."""
        key = f"bsk-{secrets.token_urlsafe(32)}"
        with self._changed() as entries:
            if any(tenant.name == known.name for known in entries.values()):
                message = f"{tenant.name!r} already has a key in {self.path}: revoke it first, or choose another name"
                raise ConfigError(message)
            entries[_digest(key)] = tenant
        return key

    def revoke(self, name: str) -> None:
        """Remove a tenant's key. Raises ConfigError if there is none."""
        with self._changed() as entries:
            named = [digest for digest, tenant in entries.items() if tenant.name == name]
            if not named:
                raise ConfigError(
                    f"{self.path} has no key for {name!r}: `blendserve keys list` shows its keys"
                )
            for digest in named:
                del entries[digest]

    @contextmanager
    def _changed(self) -> Iterator[Entries]:
        """Yield the entries to change; they are written at the end of the block. Other processes wait meanwhile.

        Raises ConfigError for a file that cannot be read or written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=LOCK_S):
                yield (entries := self.read())
                self._write(entries)
        except Timeout:
            message = (
                f"another process has been changing {self.path} for {LOCK_S:g} s: try again when it has ended"
            )
            raise ConfigError(message, path=self.path) from None
        except OSError as error:
            message = f"key file {self.path} cannot be written: {error.strerror}; give another --file"
            raise ConfigError(message, path=self.path) from None

    def _write(self, entries: Entries) -> None:
        """Replace the file atomically, readable by its owner only."""
        keys = [{"sha256": digest, **asdict(tenant)} for digest, tenant in entries.items()]
        scratch, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        with open(scratch, "w") as file:
            json.dump({"keys": keys}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, self.path)


class ApiKeys:
    """All keys that a server accepts: those of a file, and a single one from its settings, which has full access."""

    def __init__(self, http: HttpConfig, namespace: str) -> None:
        """namespace: of the single key. Raises ConfigError for a damaged file, so that the start fails."""
        self._file = KeyFile(http.keys) if http.keys else None
        self._stamp: tuple[int, ...] | None = ()  # of the file when it was read; None if it could not be read
        self._of_file = self._file.read() if self._file else {}
        key = http.api_key.get_secret_value() if http.api_key else None
        self._single = {_digest(key): Tenant("api-key", namespace, admin=True)} if key else {}
        self.are_needed = bool(self._file or self._single)

    def tenant(self, key: str) -> Tenant:
        """Return the tenant of a key. Raises NotAuthenticated."""
        digest = _digest(key)
        found = None
        for known, tenant in self._entries().items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise NotAuthenticated(
                "no valid API key: send one as `Authorization: Bearer ...` or `x-api-key: ...`"
            )
        return found

    def namespaces(self) -> set[str]:
        """Return the namespaces of all keys."""
        return {tenant.namespace for tenant in self._entries().values()}

    def _entries(self) -> Entries:
        """Return all entries. A changed file is read again; while it is missing or damaged, its keys are not valid."""
        try:
            if self._file:
                stat = self._file.path.stat()
                stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
                if stamp != self._stamp:
                    self._of_file = self._file.read()
                    self._stamp = stamp
        except (OSError, ConfigError) as error:
            if self._stamp is not None:  # once, not for each request
                log.error("the key file cannot be read, so none of its keys is valid: %s", error)
            self._of_file = {}
            self._stamp = None
        return {**self._single, **self._of_file}


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class TokenBucket:
    """A token bucket for each tenant: tokens that the tenant has used, less those refilled since.

    Of more than MAX_TENANTS tenants, the one idle for longest is forgotten.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._used: dict[str, tuple[float, float]] = {}  # tenant -> used tokens, and the time of this count

    def use(self, tenant: str, n: float, per_s: float) -> None:
        """Use `n` tokens of a bucket that is refilled by `per_s` tokens per second."""
        used = self._in_use(tenant, per_s) + n
        self._used.pop(tenant, None)
        self._used[tenant] = used, self._now()
        if len(self._used) > MAX_TENANTS:
            del self._used[next(iter(self._used))]

    def wait_s(self, tenant: str, limit: float, per_s: float) -> float:
        """Return the seconds until at most `limit` tokens are in use."""
        return max(0.0, self._in_use(tenant, per_s) - limit) / per_s

    def _in_use(self, tenant: str, per_s: float) -> float:
        used, since = self._used.get(tenant, (0.0, 0.0))
        return max(0.0, used - (self._now() - since) * per_s)


class Limits:
    """Limits of concurrent requests, requests per minute and body bytes per second, and what tenants use of them.

    A tenant's own limits replace the server's. For the event loop only.
    """

    def __init__(
        self, max_concurrent: int, max_per_minute: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_concurrent = max_concurrent
        self._max_per_minute = max_per_minute
        self._running: Counter[str] = Counter()
        self._uploading: Counter[str] = Counter()
        self._requests = TokenBucket(now)
        self._body_bytes = TokenBucket(now)

    @property
    def n_running(self) -> int:
        """Return the number of requests that run or are uploaded now."""
        return self._running.total() + self._uploading.total()

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
