"""API keys: each belongs to a tenant with a namespace and collections. The file holds hashes, never keys.

Created keys are long and random, so a plain SHA-256 cannot be inverted. A key is compared with every entry in constant
time: neither the time nor the position of an entry leaks anything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendserve.errors import ConfigError, NotAllowed, NotAuthenticated

NO_VALID_KEY = "no valid API key: send one as `Authorization: Bearer ...`"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of an API key and its rights. None in collections = all; None in a limit = the server's."""

    name: str
    namespace: str = ""
    collections: tuple[str, ...] | None = None
    read_only: bool = False  # may not add or delete documents
    admin: bool = False  # may read /metrics, which covers all tenants
    max_concurrent: int | None = None
    max_per_minute: int | None = None

    def may_use(self, collection: str) -> bool:
        return self.collections is None or collection in self.collections

    def require_writing(self) -> None:
        """Raises NotAllowed."""
        if self.read_only:
            raise NotAllowed("this API key is read-only: use a key with write access")


class KeyFile:
    """The file of keys: {"keys": [{"sha256": ..., and the fields of Tenant}, ...]}. Read again when it changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._entries: list[tuple[str, Tenant]] = []

    def tenant(self, key: str) -> Tenant:
        """The tenant of a key. Raises NotAuthenticated."""
        self._refresh()
        digest = _digest(key)
        found = None
        for known, tenant in self._entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise NotAuthenticated(NO_VALID_KEY)
        return found

    def namespaces(self) -> set[str]:
        """The namespaces of all keys."""
        self._refresh()
        return {tenant.namespace for _, tenant in self._entries}

    def tenants(self) -> list[Tenant]:
        """The tenants of all keys. Raises ConfigError for a file that cannot be read."""
        self._entries = self._read() if self.path.exists() else []
        return [tenant for _, tenant in self._entries]

    def create(self, tenant: Tenant) -> str:
        """Add a key -> the key itself, which is stored nowhere. Raises ConfigError if the name has one."""
        if any(tenant.name == known.name for known in self.tenants()):
            raise ConfigError(
                f"{tenant.name!r} already has a key in {self.path}: revoke it first, or choose another name"
            )
        key = f"bsk-{secrets.token_urlsafe(32)}"
        self._entries.append((_digest(key), tenant))
        self._write()
        return key

    def revoke(self, name: str) -> None:
        """Remove a tenant's key. Raises ConfigError if there is none."""
        if all(name != known.name for known in self.tenants()):
            raise ConfigError(f"{self.path} has no key for {name!r}: `blendserve keys list` shows its keys")
        self._entries = [entry for entry in self._entries if entry[1].name != name]
        self._write()

    def _refresh(self) -> None:
        """Read the file again if it has changed; if it is damaged, the old keys stay valid."""
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                self._entries, self._stamp = self._read(), stamp
        except (OSError, ConfigError) as error:
            log.error("the old API keys stay valid: %s", error)

    def _read(self) -> list[tuple[str, Tenant]]:
        try:
            return [_entry(values) for values in json.loads(self.path.read_text())["keys"]]
        except OSError as error:
            raise ConfigError(
                f"key file {self.path} cannot be read: {error.strerror}. Create it with `blendserve keys create`"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"key file {self.path} is damaged: restore it, or delete it and create new keys"
            ) from None

    def _write(self) -> None:
        """Replace the file atomically, readable by its owner only."""
        keys = [{"sha256": digest, **asdict(tenant)} for digest, tenant in self._entries]
        scratch = self.path.with_name(f".{self.path.name}.new")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"keys": keys}, file, indent=1)
        os.replace(scratch, self.path)


class ApiKeys:
    """All keys that a server accepts: those of a file, and one that is kept in memory and may do everything."""

    def __init__(self, file: KeyFile | None, key: str | None, namespace: str) -> None:
        """namespace: of the key in memory. Raises ConfigError for a damaged file."""
        self._file, self._digest = file, _digest(key) if key else ""
        self._owner = Tenant("api-key", namespace, admin=True)
        if file:
            file.tenants()  # a damaged file fails the start, not the first request

    def tenant(self, key: str) -> Tenant:
        """The tenant of a key. Raises NotAuthenticated."""
        if hmac.compare_digest(self._digest, _digest(key)):
            return self._owner
        if self._file is None:
            raise NotAuthenticated(NO_VALID_KEY)
        return self._file.tenant(key)

    def namespaces(self) -> set[str]:
        """The namespaces of all keys."""
        found = self._file.namespaces() if self._file else set()
        return found | {self._owner.namespace} if self._digest else found


def _entry(values: dict[str, Any]) -> tuple[str, Tenant]:
    digest = str(values.pop("sha256"))
    collections = values.pop("collections")
    return digest, Tenant(**values, collections=None if collections is None else tuple(collections))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
