"""API keys: each belongs to a tenant with a namespace and collections. The file holds hashes, never keys.

A key is random and long, so a plain SHA-256 of it cannot be turned back; it is compared in constant time with every
entry, so that neither the time nor the position tells anything.
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

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks, and what they may. None in collections = all; None in a limit = the server's."""

    name: str
    namespace: str = ""
    collections: tuple[str, ...] | None = None
    read_only: bool = False  # may not add or delete documents
    admin: bool = False  # may read /metrics, which is about everybody
    max_concurrent: int | None = None
    max_per_minute: int | None = None

    def may_use(self, collection: str) -> bool:
        return self.collections is None or collection in self.collections

    def require_writing(self) -> None:
        """Raises NotAllowed."""
        if self.read_only:
            raise NotAllowed("this API key may only read: use one that may write")


class KeyFile:
    """The file of keys: {"keys": [{"sha256": ..., and the fields of Tenant}, ...]}. Read again when it changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._entries: list[tuple[str, Tenant]] = []

    def tenant(self, key: str) -> Tenant:
        """Whose key this is. Raises NotAuthenticated."""
        self._refresh()
        digest = _digest(key)
        found = None
        for known, tenant in self._entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise NotAuthenticated("no valid API key: send one as `Authorization: Bearer ...`")
        return found

    def namespaces(self) -> set[str]:
        """Of all keys."""
        self._refresh()
        return {tenant.namespace for _, tenant in self._entries}

    def tenants(self) -> list[Tenant]:
        """Everybody who has a key. Raises ConfigError for a file that cannot be read."""
        self._entries = self._read() if self.path.exists() else []
        return [tenant for _, tenant in self._entries]

    def create(self, tenant: Tenant) -> str:
        """Add a key -> the key itself, which is nowhere else. Raises ConfigError for a name that has one."""
        if any(tenant.name == known.name for known in self.tenants()):
            raise ConfigError(
                f"{tenant.name!r} has a key in {self.path}: revoke it first, or choose another name"
            )
        key = f"bsk-{secrets.token_urlsafe(32)}"
        self._entries.append((_digest(key), tenant))
        self._write()
        return key

    def revoke(self, name: str) -> None:
        """Remove a tenant's key. Raises ConfigError when there is none."""
        if all(name != known.name for known in self.tenants()):
            raise ConfigError(f"nobody called {name!r} has a key in {self.path}: see `blendserve keys list`")
        self._entries = [entry for entry in self._entries if entry[1].name != name]
        self._write()

    def _refresh(self) -> None:
        """Take over a changed file; a broken one leaves the old keys in force."""
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                self._entries, self._stamp = self._read(), stamp
        except (OSError, ConfigError) as error:
            log.error("API keys were not read again: %s", error)

    def _read(self) -> list[tuple[str, Tenant]]:
        try:
            return [_entry(values) for values in json.loads(self.path.read_text())["keys"]]
        except OSError as error:
            raise ConfigError(
                f"key file {self.path} cannot be read: {error.strerror}. Make one with `blendserve keys create`"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"key file {self.path} is damaged: restore it, or delete it and create keys anew"
            ) from None

    def _write(self) -> None:
        """Readable by its owner alone; a kill leaves the old or the new one."""
        keys = [{"sha256": digest, **asdict(tenant)} for digest, tenant in self._entries]
        scratch = self.path.with_name(f".{self.path.name}.new")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"keys": keys}, file, indent=1)
        os.replace(scratch, self.path)


def _entry(values: dict[str, Any]) -> tuple[str, Tenant]:
    digest = str(values.pop("sha256"))
    collections = values.pop("collections")
    return digest, Tenant(**values, collections=None if collections is None else tuple(collections))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
