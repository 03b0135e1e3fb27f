"""What every server has: API keys, limits, notices and request metrics."""

from __future__ import annotations

from blendserve.config import HttpConfig
from blendserve.serve.keys import ApiKeys, KeyFile, Tenant
from blendserve.serve.limits import Limits
from blendserve.serve.metrics import HttpMetrics
from blendserve.serve.notices import Notices


class Front:
    """Keys, limits and counters of one server. Raises ConfigError for a damaged key file."""

    def __init__(self, http: HttpConfig, metrics: HttpMetrics, namespace: str = "") -> None:
        """namespace: of requests without a key of their own: those of the single key, and all if no keys are set."""
        self.http, self.metrics = http, metrics
        self._namespace = namespace
        key = http.api_key.get_secret_value() if http.api_key else None
        file = KeyFile(http.keys) if http.keys else None
        self.keys = ApiKeys(file, key, namespace) if file or key else None
        self.notices = Notices()
        self.limits = Limits(http.max_concurrent, http.max_per_minute)

    def anonymous(self, address: str) -> Tenant:
        """The tenant of an address, for a server without keys."""
        return Tenant(address, self._namespace, admin=True)
