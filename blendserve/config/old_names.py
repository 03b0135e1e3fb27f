"""Names of settings in earlier releases, read for one release with one warning each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from blendserve.registry import DELIVERED, SHARED_STORE, STORES

log = logging.getLogger(__name__)

RENAMED = {  # old dotted name -> new one
    "reader.model": "model.name",
    "reader": "model",
    "store.tiers.memory_bytes": "store.memory_bytes",
    "store.tiers.host_bytes": "store.memory_bytes",
    "store.tiers.device_bytes": "store.device_bytes",
    "store.tiers.write": "store.remote_write",
    "store.tiers.remote": "store.remote",
}
IS_CONSTANT = (  # no longer settings: what a file says of them is ignored
    "blend.seed",
    *("store.valkey.in_flight_mb", "store.kdn.in_flight_mb", "store.tiers.prefetch_bytes"),
    *("store.remote.valkey.in_flight_mb", "store.remote.kdn.in_flight_mb"),
    *("serve.prefill_share", "serve.job_share", "serve.share_mb", "serve.body_s", "serve.ping_s"),
    *("deliver.body_s", "deliver.send_s"),
)
FLOOR = "blend.floor"  # is part of the ratio now: auto:FLOOR
VALKEY_URL = "valkey://127.0.0.1:6379"  # where no setting names another
KDN_URL = "http://127.0.0.1:8010"


def upgrade(values: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one source under the names of today; changes `values`. before: of the sources that it overrides."""
    for old, new in RENAMED.items():
        found, value = _pop(values, old)
        if found and (value or _pop(values, new, keep=True)[1] is None):
            _warn(f"setting {old!r} is now {new!r}: the old name is read until the next release")
            _set(values, new, value)
    for old in IS_CONSTANT:
        if _pop(values, old)[0]:
            _warn(f"setting {old!r} is no longer a setting and is ignored: remove it")
    if isinstance(store := values.get("store"), dict) and not store.get("tiers", True):
        del store["tiers"]
    for name in ("store", "store.remote"):
        place, was = _pop(values, name, keep=True)[1], _pop(dict(before), name, keep=True)[1]
        if isinstance(place, dict):
            _upgrade_place(place, was.get("location") or "" if isinstance(was, dict) else "", name)
    found, floor = _pop(values, FLOOR)
    if found:
        _warn(f"setting {FLOOR!r} is now part of blend.ratio: write 'auto:{floor}'")
        if isinstance(blend := values.get("blend"), dict) and blend.get("ratio") == "auto":
            blend["ratio"] = f"auto:{floor}"
    return values


def _upgrade_place(place: dict[str, Any], before: str, section: str) -> None:
    """Replace kind, path, valkey.* and kdn.* of a store by its location and the settings beside it."""
    old: dict[str, Any] = {
        name: place.pop(name) for name in ("kind", "path", "valkey", "kdn") if name in place
    }
    if not old:
        return
    names = [n for n, v in old.items() if not isinstance(v, dict)]
    names += [f"{n}.{inner}" for n, v in old.items() if isinstance(v, dict) for inner in v]
    for name in names:
        _warn(f"setting '{section}.{name}' is now part of '{section}.location' and the settings beside it")
    kind = old.get("kind") or _kind_of(before)
    if kind not in STORES.names:
        place["kind"] = kind  # to be refused by its name
        return
    source = (
        DELIVERED if kind == DELIVERED else SHARED_STORE
    )  # `store merge` read the options of servers beside a folder
    about = dict(old.get(source) or {})
    url = about.pop("url", None)
    if kind == SHARED_STORE:
        location = url or (before if _kind_of(before) == kind else VALKEY_URL)
        if about.get("username"):
            location = location.replace("://", f"://{about['username']}@", 1)
    elif kind == DELIVERED:
        collection = about.pop("collection", "")
        location = f"{url or KDN_URL}/{collection}" if collection or section == "store" else ""
        if fingerprint := about.pop("relay_fingerprint", ""):
            about["relay"] = f"{about.get('relay', '')}#{fingerprint}"
    else:
        location = str(old.get("path") or "") if kind == STORES.default else kind
    about.pop("username", None)
    if about.get("deadline_s") == (5.0 if kind == DELIVERED else 1.0):
        del about["deadline_s"]  # the default, then as now
    if secret := about.pop("password_file", None) or about.pop("key_file", None):
        about["secret_file"] = secret
    place.update(
        {name: value for name, value in {"location": location, **about}.items() if name not in place}
    )


def _kind_of(location: str) -> str:
    scheme, url, _ = location.partition("://")
    if url:
        return DELIVERED if scheme.startswith("http") else SHARED_STORE
    return location if location in STORES.names else STORES.default


@cache
def _warn(message: str) -> None:
    log.warning(message)


def _pop(values: dict[str, Any], name: str, keep: bool = False) -> tuple[bool, Any]:
    """Remove a setting, unless it is to be kept -> whether it was there, and its value."""
    *sections, last = name.split(".")
    inner: Any = values
    for section in sections:
        inner = inner.get(section) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or last not in inner:
        return False, None
    return True, inner[last] if keep else inner.pop(last)


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    if isinstance(value, dict) and isinstance(values.get(last), dict):
        value = {**value, **values[last]}
    values[last] = value
