"""Names of settings in files of earlier releases, read for one release with one warning each."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from blendserve.errors import ConfigError
from blendserve.registry import DELIVERED, SHARED_STORE, STORES

log = logging.getLogger(__name__)

RENAMED = {  # old dotted name -> new one
    **{"reader.model": "model.name", "reader": "model"},
    **{f"store.tiers.{name}": f"store.{name}" for name in ("memory_bytes", "device_bytes", "remote")},
    **{"store.tiers.host_bytes": "store.memory_bytes", "store.tiers.write": "store.remote_write"},
}
CONSTANTS = (  # no longer settings: ignored
    *("blend.seed", "store.tiers.prefetch_bytes", "deliver.body_s", "deliver.send_s"),
    *("store.valkey.in_flight_mb", "store.kdn.in_flight_mb"),
    *("store.remote.valkey.in_flight_mb", "store.remote.kdn.in_flight_mb"),
    *("serve.prefill_share", "serve.job_share", "serve.share_mb", "serve.body_s", "serve.ping_s"),
)
DEFAULT_URL = {SHARED_STORE: "valkey://127.0.0.1:6379", DELIVERED: "http://127.0.0.1:8010"}
DEADLINE_S = {SHARED_STORE: 1.0, DELIVERED: 5.0}  # the defaults, then as now


def upgrade(values: dict[str, Any]) -> dict[str, Any]:
    """Rename the settings of a file, in place."""
    for old, new in RENAMED.items():
        section, name = _section(values, old)
        if name in section:
            value = section.pop(name)
            target, last = _section(values, new, create=True)
            if value or target.get(last) is None:
                _warn(f"setting {old!r} is now {new!r}: the old name is read until the next release")
                both = isinstance(value, dict) and isinstance(target.get(last), dict)
                target[last] = {**value, **target[last]} if both else value
    for old in CONSTANTS:
        section, name = _section(values, old)
        if name in section:
            del section[name]
            _warn(f"setting {old!r} is no longer a setting and is ignored: remove it")
    store, blend = (_section(values, f"{name}.")[0] for name in ("store", "blend"))
    if not store.get("tiers", True):
        del store["tiers"]
    for name in ("store", "store.remote"):
        _upgrade_place(_section(values, f"{name}.")[0], name)
    if "floor" in blend:
        floor = blend.pop("floor")
        _warn(f"setting 'blend.floor' is now part of blend.ratio: write 'auto:{floor}'")
        if blend.get("ratio") == "auto":
            blend["ratio"] = f"auto:{floor}"
    return values


def _upgrade_place(place: dict[str, Any], section: str) -> None:
    """Replace kind, path, valkey.* and kdn.* of a store by its location and the settings beside it."""
    old: dict[str, Any] = {n: place.pop(n) for n in ("kind", "path", "valkey", "kdn") if n in place}
    for name, value in old.items():
        for inner in [f".{inner}" for inner in value] if isinstance(value, dict) else [""]:
            old_name = f"{section}.{name}{inner}"
            _warn(f"setting {old_name!r} is now part of '{section}.location' and the settings beside it")
    kind = old.get("kind") or STORES.default
    if not old or kind not in STORES.names:
        place.update({"kind": kind} if old else {})  # an unknown kind is refused by its name
        return
    # The options of a server counted beside a folder, too: `store merge` read them.
    server = DELIVERED if kind == DELIVERED else SHARED_STORE
    about = old.get(server) or {}
    if not isinstance(about, dict):
        raise ConfigError(f"setting '{section}.{server}' cannot be {about!r}: it has settings of its own")
    about = dict(about)
    url, user, collection = (str(about.pop(name, "") or "") for name in ("url", "username", "collection"))
    fingerprint = about.pop("relay_fingerprint", "")
    if kind == SHARED_STORE:
        location = url or DEFAULT_URL[kind]
        location = location.replace("://", f"://{user}@", 1) if user else location
    elif kind == DELIVERED:
        location = f"{url or DEFAULT_URL[kind]}/{collection}" if collection or section == "store" else ""
        about |= {"relay": f"{about.get('relay', '')}#{fingerprint}"} if fingerprint else {}
    else:
        location = str(old.get("path") or "") if kind == STORES.default else kind
    if about.get("deadline_s") == DEADLINE_S.get(kind, 1.0):
        del about["deadline_s"]
    if secret := about.pop("password_file", None) or about.pop("key_file", None):
        about["secret_file"] = secret
    place.update({name: v for name, v in {"location": location, **about}.items() if name not in place})


@cache
def _warn(message: str) -> None:
    log.warning(message)


def _section(values: dict[str, Any], name: str, create: bool = False) -> tuple[dict[str, Any], str]:
    """The mapping that holds a dotted setting, and the setting's last part; an empty mapping if there is none."""
    *sections, last = name.split(".")
    for section in sections:
        inner = values.setdefault(section, {}) if create else values.get(section)
        values = inner if isinstance(inner, dict) else {}
    return values, last
