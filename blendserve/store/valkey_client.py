"""A client of the server that the settings name, made by valkey-py, and what its errors mean.

Credentials come from the environment or a file each time a connection is made, and are in no message.
"""

from __future__ import annotations

import os
import re
from typing import Any, TypeAlias

from blendserve.config import ValkeyConfig
from blendserve.errors import StoreError, StoreFull, StoreUnavailable
from blendserve.extras import install_hint
from blendserve.store.bounded import HINT, PeerUnusable, read_file

PASSWORD = "BLENDSERVE_VALKEY_PASSWORD"
# Errors of a server that is no longer the primary, or not yet, where valkey-py has no class for them
FAILOVER = re.compile(r"\b(READONLY|MASTERDOWN|CLUSTERDOWN|LOADING|NOREPLICAS)\b")
OLDEST = 7  # major version of either: EXPIRE has XX

Client: TypeAlias = Any  # valkey.Valkey or valkey.ValkeyCluster: their commands have the same names


def library() -> Any:
    """The package valkey. Raises StoreUnavailable."""
    try:
        import valkey
    except ImportError:
        raise StoreUnavailable(
            f"a store on a Valkey server needs the package valkey: {install_hint('valkey')}"
        ) from None
    return valkey


def _checked_connection(lib: Any) -> Any:
    """The class of TLS connections that check that the certificate names the server's host.

    valkey-py does not check it by default, and its cluster client drops the option for the nodes that it finds.
    """
    connection: Any = lib.SSLConnection

    class CheckedConnection(connection):  # type: ignore[misc]  # the package may be missing
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "ssl_check_hostname": True})

    return CheckedConnection


class ValkeyPeer:
    """The server or cluster of the settings. Raises StoreUnavailable if the client's package is missing."""

    def __init__(self, config: ValkeyConfig) -> None:
        self._config = config
        self._lib = library()
        self.where = config.where
        self.server = config.server
        self.deadline_s = config.deadline_s

    def connect(self) -> Client:
        """A client of the server or cluster. Raises PeerUnusable, and what valkey-py does: see `explain`."""
        options = self._options()
        # The connection class decides on TLS: that of a TLS scheme would replace ours for the nodes of a cluster.
        url = re.sub(r"^\w+://", "valkey://", self._config.url) if self._config.tls else self._config.url
        client = self._lib.Valkey.from_url(url, **options)
        if not self._is_cluster(client):
            return client
        client.close()
        return self._lib.ValkeyCluster.from_url(url, cluster_error_retry_attempts=1, **options)

    def disconnect(self, client: Client) -> None:
        """Cut every connection, those in use too: a thread that waits for one gets an error."""
        nodes = client.get_nodes() if hasattr(client, "get_nodes") else []
        for each in [node.valkey_connection for node in nodes] or [client]:
            if each is not None:
                each.connection_pool.disconnect()

    def is_stale(self, error: Exception) -> bool:
        """Whether a new connection may succeed: the server was restarted, or another one has its address now."""
        exceptions = self._lib.exceptions
        if isinstance(error, exceptions.ReadOnlyError | exceptions.ClusterDownError):
            return True
        if isinstance(error, self._lib.ResponseError) and FAILOVER.search(str(error)):
            return True
        other = isinstance(error, self._lib.TimeoutError | self._lib.AuthenticationError)
        return isinstance(error, self._lib.ConnectionError) and not other

    def timeout_reason(self) -> str:
        """Why an answer that did not come opens the breaker; the text follows the server's name."""
        tls = "; it was asked over TLS: if it speaks none, its url begins with valkey://"
        why = f"does not answer within {self.deadline_s:g} s: check it, or raise deadline_s {HINT}"
        return why + tls * self._config.tls

    def explain(self, error: Exception) -> StoreError | str:
        """Our error for one of valkey-py's; a text that follows the server's name if the error opens the breaker."""
        lib = self._lib
        text = str(error)
        if isinstance(error, PeerUnusable):
            return text
        if isinstance(error, lib.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
            return (
                f"does not accept the credentials: set {PASSWORD} in the environment or secret_file {HINT}, and "
                "username if the user has a name"
            )
        if isinstance(error, lib.exceptions.OutOfMemoryError) or text.startswith("OOM"):
            return StoreFull(
                f"{self.server} has no memory left for chunks: raise its maxmemory, let it evict (maxmemory-policy "
                "volatile-lru), or lower store.cap_gb"
            )
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return (
                f"has a certificate that is not trusted for this host ({text}): give the name in its certificate in the "
                "location, or the file with its authority in the environment variable SSL_CERT_FILE"
            )
        if isinstance(error, lib.TimeoutError):
            return self.timeout_reason()
        if isinstance(error, lib.BusyLoadingError):
            return "is still loading its data"
        if "MASTERDOWN" in text:
            return "is a replica that has lost its primary"
        if isinstance(error, lib.exceptions.ClusterError | lib.exceptions.ValkeyClusterException):
            return f"is a cluster that does not serve now ({text})"
        if isinstance(error, lib.ConnectionError | OSError):
            return f"cannot be reached ({text}): start it, or correct its location in the settings"
        if isinstance(error, lib.ResponseError):
            return StoreUnavailable(f"{self.server} refuses: {text}")
        return f"sent something that is not a response ({type(error).__name__}: {text})"

    def _options(self) -> dict[str, Any]:
        """Raises PeerUnusable."""
        config = self._config
        password = os.environ.get(PASSWORD)
        if config.secret_file:
            password = read_file(config.secret_file, "secret_file").strip()
        options: dict[str, Any] = {"password": password or None, "socket_timeout": config.deadline_s}
        if not config.url.startswith("unix:"):
            options |= {"socket_connect_timeout": config.deadline_s, "socket_keepalive": True}
        if config.tls:
            options["connection_class"] = _checked_connection(self._lib)
        return options

    def _is_cluster(self, client: Client) -> bool:
        """Raises PeerUnusable for another server or version."""
        try:
            info = client.info("server")
        except self._lib.exceptions.NoPermissionError:
            return False  # a user who may not ask; a cluster's server refuses the first foreign key
        kind = "valkey" if info.get("server_name") == "valkey" or "valkey_version" in info else "redis"
        version = str(info.get(f"{kind}_version", ""))
        major = re.match(r"\d+", version)
        if major is None or int(major[0]) < OLDEST:
            raise PeerUnusable(
                f"is {kind} {version or 'without a version'}, and Valkey 7 or Redis 7 is needed: upgrade it, or correct "
                "its url in the settings"
            )
        return "cluster" in (info.get("server_mode"), info.get("redis_mode"))
