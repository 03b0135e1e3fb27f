"""A client of the server that the settings name, made by valkey-py, and what its errors mean.

Credentials come from the environment or a file each time a connection is made, and are in no message.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeAlias

from blendserve.config import ValkeyConfig
from blendserve.errors import StoreError, StoreFull, StoreUnavailable
from blendserve.extras import install_hint

PASSWORD = "BLENDSERVE_VALKEY_PASSWORD"
WHERE = "beside its url in the settings"
OLDEST = {"valkey": 7, "redis": 6}  # major versions

Client: TypeAlias = Any  # valkey.Valkey or valkey.ValkeyCluster: their commands have the same names


class Unfit(Exception):
    """The server cannot be used as things are; the text follows its name."""


def library() -> Any:
    """The package valkey. Raises StoreUnavailable."""
    try:
        import valkey
    except ImportError:
        raise StoreUnavailable(
            f"a store on a Valkey server needs the package valkey: {install_hint('valkey')}"
        ) from None
    return valkey


class ValkeyPeer:
    """The server or cluster of the settings. Raises StoreUnavailable if the client's package is missing."""

    def __init__(self, config: ValkeyConfig) -> None:
        self._config, self._lib = config, library()
        self.where, self.server, self.deadline_s = config.where, config.server, config.deadline_s

    def connect(self) -> Client:
        """A client of the server or cluster. Raises Unfit, and what valkey-py does: see `explained`."""
        config, options = self._config, self._options()
        if config.socket:
            client = self._lib.Valkey(unix_socket_path=config.socket, **options)
        else:
            options |= {"socket_connect_timeout": config.deadline_s, "socket_keepalive": True}
            client = self._lib.Valkey(host=config.host, port=config.port, db=config.database, **options)
        if not self._is_cluster(client):
            return client
        client.close()
        return self._lib.ValkeyCluster(
            host=config.host, port=config.port, cluster_error_retry_attempts=1, **options
        )

    def disconnect(self, client: Client) -> None:
        """Cut every connection, those in use too: a thread that waits for one gets an error."""
        nodes = client.get_nodes() if hasattr(client, "get_nodes") else []
        for each in [node.valkey_connection for node in nodes] or [client]:
            if each is not None:
                each.connection_pool.disconnect()

    def stale(self, error: Exception) -> bool:
        """Whether a kept connection may have ended with a server that was restarted."""
        other = isinstance(error, self._lib.TimeoutError | self._lib.AuthenticationError)
        return isinstance(error, self._lib.ConnectionError) and not other

    def late(self) -> str:
        """Why an answer that did not come opens the breaker; the text follows the server's name."""
        tls = "; it was asked over TLS: if it speaks none, its url begins with valkey://"
        return (
            f"does not answer within {self.deadline_s:g} s: check it, or raise deadline_s {WHERE}"
            f"{tls if self._config.tls else ''}"
        )

    def explained(self, error: Exception) -> StoreError | str:
        """Our error for one of valkey-py's; a text that follows the server's name if the error opens the breaker."""
        lib, text = self._lib, str(error)
        if isinstance(error, StoreError):
            return error
        if isinstance(error, Unfit):
            return text
        if isinstance(error, lib.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
            return (
                f"does not accept the credentials: set {PASSWORD} in the environment or secret_file {WHERE}, and "
                "username if the user has a name"
            )
        if isinstance(error, lib.exceptions.OutOfMemoryError) or text.startswith("OOM"):
            return StoreFull(
                f"{self.server} has no memory left for chunks: raise its maxmemory, let it evict (maxmemory-policy "
                "volatile-lru), or lower store.cap_gb"
            )
        if isinstance(error, lib.TimeoutError):
            return self.late()
        if isinstance(error, lib.BusyLoadingError):
            return "is still loading its data"
        if isinstance(error, lib.exceptions.ClusterError | lib.exceptions.ValkeyClusterException):
            return f"is a cluster that does not serve now ({text})"
        if isinstance(error, lib.ConnectionError | OSError):
            return f"cannot be reached ({text.rstrip('.')}): start it, or correct its url in the settings"
        if isinstance(error, lib.ResponseError):
            return StoreUnavailable(f"{self.server} refuses: {text}")
        return f"sends what is no answer ({type(error).__name__}: {text})"

    def _options(self) -> dict[str, Any]:
        """Raises Unfit."""
        config, password = self._config, os.environ.get(PASSWORD)
        if config.secret_file:
            password = _read(config.secret_file, "secret_file").strip()
        options = {
            "username": config.username or None,
            "password": password or None,
            "socket_timeout": config.deadline_s,
        }
        if config.tls and config.ca_file:
            _read(config.ca_file, "ca_file")
        return options | (
            {"ssl": True, "ssl_ca_certs": config.ca_file and str(config.ca_file)} if config.tls else {}
        )

    def _is_cluster(self, client: Client) -> bool:
        """Raises Unfit for another server or version."""
        try:
            info = client.info("server")
        except self._lib.exceptions.NoPermissionError:
            return False  # a user who may not ask; a cluster's server refuses the first foreign key
        kind = "valkey" if info.get("server_name") == "valkey" or "valkey_version" in info else "redis"
        version = str(info.get(f"{kind}_version", ""))
        major = re.match(r"\d+", version)
        if major is None or int(major[0]) < OLDEST[kind]:
            raise Unfit(
                f"is {kind} {version or 'without a version'}, and Valkey 7 or Redis 6 is needed: upgrade it, or correct "
                "its url in the settings"
            )
        return "cluster" in (info.get("server_mode"), info.get("redis_mode"))


def _read(path: Path, setting: str) -> str:
    """Raises Unfit, naming the setting."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise Unfit(
            f"cannot be asked, as the file {path} cannot be read ({why}): correct {setting} {WHERE}"
        ) from None
