"""API keys: each belongs to a tenant with a namespace and collections. Files hold hashes, never keys.

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

from blendserve.config import HttpConfig
from blendserve.errors import ConfigError, NotAuthenticated, PermissionDenied

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
        """Whether the key covers a collection."""
        return self.collections is None or collection in self.collections

    def require_write_access(self) -> None:
        """Raises PermissionDenied."""
        if self.read_only:
            raise PermissionDenied("this API key is read-only: use a key with write access")


Entries = dict[str, Tenant]
"""SHA-256 of a key -> its tenant."""


class KeyFile:
    """A file of keys: {"keys": [{"sha256": ..., and the fields of Tenant}, ...]}."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Entries:
        """The entries; a missing file has none. Raises ConfigError."""
        try:
            keys = json.loads(self.path.read_text())["keys"] if self.path.exists() else []
            for key in keys:
                key["collections"] = None if key["collections"] is None else tuple(key["collections"])
            return {str(key.pop("sha256")): Tenant(**key) for key in keys}
        except (OSError, ValueError, KeyError, TypeError):
            message = f"key file {self.path} cannot be read: restore it, or delete it and create new keys"
            raise ConfigError(message, path=self.path) from None

    def create(self, tenant: Tenant) -> str:
        """Add a key -> the key itself, which is stored nowhere. Raises ConfigError if the name has one."""
        entries = self.read()
        if any(tenant.name == known.name for known in entries.values()):
            message = (
                f"{tenant.name!r} already has a key in {self.path}: revoke it first, or choose another name"
            )
            raise ConfigError(message)
        key = f"bsk-{secrets.token_urlsafe(32)}"
        self._write({**entries, _digest(key): tenant})
        return key

    def revoke(self, name: str) -> None:
        """Remove a tenant's key. Raises ConfigError if there is none."""
        entries = self.read()
        remaining = {digest: tenant for digest, tenant in entries.items() if tenant.name != name}
        if len(remaining) == len(entries):
            raise ConfigError(f"{self.path} has no key for {name!r}: `blendserve keys list` shows its keys")
        self._write(remaining)

    def _write(self, entries: Entries) -> None:
        """Replace the file atomically, readable by its owner only."""
        keys = [{"sha256": digest, **asdict(tenant)} for digest, tenant in entries.items()]
        scratch = self.path.with_name(f".{self.path.name}.new")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"keys": keys}, file, indent=1)
        os.replace(scratch, self.path)


class ApiKeys:
    """All keys that a server accepts: those of a file, and a single one from its settings, which has full access."""

    def __init__(self, http: HttpConfig, namespace: str) -> None:
        """namespace: of the single key. Raises ConfigError for a damaged file, so that the start fails."""
        self._file = KeyFile(http.keys) if http.keys else None
        self._stamp = (0, 0)  # time and size of the file when it was read
        self._of_file = self._file.read() if self._file else {}
        key = http.api_key.get_secret_value() if http.api_key else None
        self._single = {_digest(key): Tenant("api-key", namespace, admin=True)} if key else {}
        self.are_needed = bool(self._file or self._single)

    def tenant(self, key: str) -> Tenant:
        """The tenant of a key. Raises NotAuthenticated."""
        digest, found = _digest(key), None
        for known, tenant in self._entries().items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise NotAuthenticated("no valid API key: send one as `Authorization: Bearer ...`")
        return found

    def namespaces(self) -> set[str]:
        """The namespaces of all keys."""
        return {tenant.namespace for tenant in self._entries().values()}

    def _entries(self) -> Entries:
        """All entries. The file is read again when it has changed; if it is damaged, its old keys stay valid."""
        try:
            if self._file:
                stat = self._file.path.stat()
                if (stamp := (stat.st_mtime_ns, stat.st_size)) != self._stamp:
                    self._of_file, self._stamp = self._file.read(), stamp
        except (OSError, ConfigError) as error:
            log.error("the old API keys stay valid: %s", error)
        return {**self._single, **self._of_file}


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
