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
BESIDE = "beside its url in the settings"
OLDEST = {"valkey": 7, "redis": 6}  # major versions that are known to do

Client: TypeAlias = Any  # valkey.Valkey or valkey.ValkeyCluster: what is asked of them has the same names


class Unfit(Exception):
    """The server cannot be used as things are; the words follow its name."""


class ValkeyPeer:
    """The server or cluster of the settings, as network/connection.py asks it.

    Raises StoreUnavailable where the client's package is missing.
    """

    def __init__(self, config: ValkeyConfig) -> None:
        library()
        self._config = config
        self.where, self.server, self.deadline_s = config.where, config.server, config.deadline_s

    def connect(self) -> Client:
        return connect(self._config)

    def disconnect(self, client: Client) -> None:
        disconnect(client)

    def explained(self, error: Exception) -> StoreError | str:
        return explained(error, self._config)

    def late(self) -> str:
        return late(self._config)

    def stale(self, error: Exception) -> bool:
        lib = library()
        told = isinstance(error, lib.TimeoutError | lib.AuthenticationError)
        return isinstance(error, lib.ConnectionError) and not told


def library() -> Any:
    """The package valkey. Raises StoreUnavailable."""
    try:
        import valkey
    except ImportError:
        raise StoreUnavailable(
            f"a store on a Valkey server needs the package valkey: {install_hint('valkey')}"
        ) from None
    return valkey


def connect(config: ValkeyConfig) -> Client:
    """A client of the server or cluster. Raises StoreUnavailable, and what valkey-py does: see `explained`."""
    lib = library()
    options = _options(config)
    at: dict[str, Any] = (
        {"unix_socket_path": config.socket}
        if config.socket
        else {"host": config.host, "port": config.port, "db": config.database}
    )
    client = lib.Valkey(**at, **options)
    if _checked(client, lib, config) == "cluster":
        client.close()
        return lib.ValkeyCluster(
            host=config.host, port=config.port, cluster_error_retry_attempts=1, **options
        )
    return client


def disconnect(client: Client) -> None:
    """Cut every connection, those in use too: who waits for one gets an error."""
    nodes = client.get_nodes() if hasattr(client, "get_nodes") else []
    clients = [node.valkey_connection for node in nodes] if nodes else [client]
    for each in clients:
        if each is not None:
            each.connection_pool.disconnect()


def explained(error: Exception, config: ValkeyConfig) -> StoreError | str:
    """Our error for one of valkey-py's; where the server is to be left alone for it, words that follow its name."""
    lib = library()
    if isinstance(error, StoreError):
        return error
    if isinstance(error, Unfit):
        return str(error)
    if isinstance(error, lib.AuthenticationError) or str(error).startswith(("NOAUTH", "WRONGPASS")):
        return (
            f"does not accept the credentials: set {PASSWORD} in the environment or password_file {BESIDE}, and username "
            "where the user has a name"
        )
    if isinstance(error, lib.exceptions.OutOfMemoryError) or str(error).startswith("OOM"):
        return StoreFull(
            f"{config.server} has no memory left for chunks: raise its maxmemory, let it evict (maxmemory-policy "
            "volatile-lru), or lower store.cap_gb"
        )
    if isinstance(error, lib.TimeoutError):
        return late(config)
    if isinstance(error, lib.BusyLoadingError):
        return "is still loading its data"
    if isinstance(error, lib.exceptions.ClusterError | lib.exceptions.ValkeyClusterException):
        return f"is a cluster that does not serve now ({error})"
    if isinstance(error, lib.ConnectionError | OSError):
        return f"cannot be reached ({str(error).rstrip('.')}): start it, or correct its url in the settings"
    if isinstance(error, lib.ResponseError):
        return StoreUnavailable(f"{config.server} refuses: {error}")
    return f"sends what is no answer ({type(error).__name__}: {error})"


def late(config: ValkeyConfig) -> str:
    """What is said of a server whose answer did not come; the words follow its name."""
    tls = "; it was asked over TLS: where it speaks none, its url begins with valkey://" if config.tls else ""
    return f"does not answer within {config.deadline_s:g} s: see whether it is well, or raise deadline_s {BESIDE}{tls}"


def _options(config: ValkeyConfig) -> dict[str, Any]:
    seconds = config.deadline_s
    options: dict[str, Any] = {
        "username": config.username or None,
        "password": _password(config),
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "socket_keepalive": True,
    }
    if config.socket:
        options.pop("socket_connect_timeout")
        options.pop("socket_keepalive")
    if config.tls:
        if config.ca_file:
            _text(config.ca_file, "ca_file")
        options |= {"ssl": True, "ssl_ca_certs": str(config.ca_file) if config.ca_file else None}
    return options


def _password(config: ValkeyConfig) -> str | None:
    """Raises Unfit for a file that cannot be read."""
    if config.password_file is None:
        return os.environ.get(PASSWORD) or None
    return _text(config.password_file, "password_file").strip() or None


def _text(path: Path, setting: str) -> str:
    """Raises Unfit, naming the setting."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise Unfit(
            f"cannot be asked, as the file {path} cannot be read ({why}): correct {setting} {BESIDE}"
        ) from None


def _checked(client: Client, lib: Any, config: ValkeyConfig) -> str:
    """The server's mode, standalone or cluster. Raises Unfit."""
    try:
        info = client.info("server")
    except lib.exceptions.NoPermissionError:
        return "standalone"  # a user who may not ask; a cluster's server refuses the first foreign key
    kind = "valkey" if info.get("server_name") == "valkey" or "valkey_version" in info else "redis"
    version = str(info.get(f"{kind}_version", ""))
    major = re.match(r"\d+", version)
    if major is None or int(major[0]) < OLDEST[kind]:
        raise Unfit(
            f"is {kind} {version or 'of no version'}, and Valkey 7 or Redis 6 is needed: upgrade it, or correct its "
            "url in the settings"
        )
    return str(info.get("server_mode") or info.get("redis_mode") or "standalone")
