"""Names of settings in earlier releases, read for one release with one warning each."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

RENAMED: dict[str, str] = {}  # old dotted name -> new one, a section before its settings
IS_CONSTANT = (  # no longer settings: what a file says of them is ignored
    *("store.valkey.in_flight_mb", "store.kdn.in_flight_mb", "store.tiers.prefetch_bytes"),
    *("store.tiers.remote.valkey.in_flight_mb", "store.tiers.remote.kdn.in_flight_mb"),
    *("serve.prefill_share", "serve.job_share", "serve.share_mb"),
)
FLOOR = "blend.floor"  # is part of the ratio now: auto:FLOOR


def upgrade(values: dict[str, Any]) -> dict[str, Any]:
    """The same settings under the names of today; changes `values`."""
    for old, new in RENAMED.items():
        found, value = _pop(values, old)
        if found:
            _warn(f"setting {old!r} is now {new!r}: the old name is read until the next release")
            _set(values, new, value)
    for old in IS_CONSTANT:
        if _pop(values, old)[0]:
            _warn(f"setting {old!r} is no longer a setting and is ignored: remove it")
    found, floor = _pop(values, FLOOR)
    if found:
        _warn(f"setting {FLOOR!r} is now part of blend.ratio: write 'auto:{floor}'")
        if isinstance(blend := values.get("blend"), dict) and blend.get("ratio") == "auto":
            blend["ratio"] = f"auto:{floor}"
    return values


@cache
def _warn(message: str) -> None:
    log.warning(message)


def _pop(values: dict[str, Any], name: str) -> tuple[bool, Any]:
    """Remove a setting -> whether it was there, and its value."""
    *sections, last = name.split(".")
    inner: Any = values
    for section in sections:
        inner = inner.get(section) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or last not in inner:
        return False, None
    return True, inner.pop(last)


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    if isinstance(value, dict) and isinstance(values.get(last), dict):
        value = {**value, **values[last]}
    values[last] = value
