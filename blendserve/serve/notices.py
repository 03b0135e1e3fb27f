"""Notices about a request: fields that the server ignored, and a question that looks like pasted passages.

A response carries them in `x_blendserve`; the log has each once per server process. Ignored fields include the
parameters of other servers, because their clients send them to every server.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

# Unknown fields that cannot change an answer are not named.
LABELS = {"user", "name", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"}
LABELS |= {"prompt_cache_key", "prompt_cache_retention", "prediction", "include_obfuscation"}
MAX_NAMES = 20  # ignored fields that a response names
MAX_CHARS = 64  # of a name
MAX_LOGGED = 256  # notices that a process logs, so that no client can fill the log

log = logging.getLogger(__name__)


class Notices:
    """The notices of one server. Used by the event loop alone."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def ignored(self, body: BaseModel) -> dict[str, Any]:
        """Return {"ignored": paths of unknown fields}, or {}; beyond MAX_NAMES, `ignored_total` has their number."""
        names = [*unknown_fields(body)]
        for name in names[:MAX_NAMES]:
            pattern = re.sub(r"\.\d+\.", ".*.", name)
            self._warn(pattern, f"request field {pattern!r} is not supported and was ignored")
        total = {"ignored_total": len(names)} if len(names) > MAX_NAMES else {}
        return {"ignored": names[:MAX_NAMES], **total} if names else {}

    def as_extras(self, body: BaseModel) -> dict[str, Any]:
        """Return {"x_blendserve": notices}, or {}, for responses that have no other extras."""
        ignored = self.ignored(body)
        return {"x_blendserve": ignored} if ignored else {}

    def long_question(self, n_tokens: int, chunk_tokens: int) -> dict[str, Any]:
        """Return {"hint": advice} for a query longer than a chunk, which probably contains passages; else {}."""
        if n_tokens <= chunk_tokens:
            return {}
        hint = (
            f"The message has {n_tokens} tokens and was used as the retrieval query. "
            "Send passages in `documents`, or set prompt.separator."
        )
        self._warn("", hint)
        return {"hint": hint}

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(kind)
            log.warning("%s", message)


def unknown_fields(body: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the paths of unknown fields with a value, such as `messages.0.foo`, each cut to MAX_CHARS characters."""
    for name, value in (body.model_extra or {}).items():
        is_empty = value is None or value in ({}, [])
        if not (is_empty or name in LABELS):
            yield f"{path}{name[:MAX_CHARS]}"[:MAX_CHARS]
    for name in type(body).model_fields:
        value = getattr(body, name)
        inner = {f"{i}.": item for i, item in enumerate(value)} if isinstance(value, list) else {"": value}
        for index, item in inner.items():
            if isinstance(item, BaseModel):
                yield from unknown_fields(item, f"{path}{name}.{index}")
