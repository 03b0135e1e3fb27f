"""Notices about a request: fields that the server ignored, and a question that looks like pasted passages.

A response carries them in `x_blendserve`; the log has each once per server process. Ignored fields include the
sampling parameters of other servers (top_k, min_p, repetition_penalty, guided_json, chat_template_kwargs), because
their clients send them to every server, and `tools`, which a model may always leave unused. LABELS and NEUTRAL list
fields that cannot change an answer: they are not named.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from blendserve.serve.schemas import Body

LABELS = frozenset(
    [
        *("user", "name", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "include_obfuscation"),
    ]
)
NEUTRAL: dict[str, tuple[Any, ...]] = {"top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}
MAX_NAMES = 20  # ignored fields that a response names
MAX_CHARS = 64  # of a name
MAX_LOGGED = 256  # names that a process logs, so that no client can fill the log

log = logging.getLogger(__name__)


class Notices:
    """The notices of one server. Used by the event loop alone."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._hinted = False

    def ignored(self, body: Body) -> dict[str, Any]:
        """{"ignored": paths of unknown fields}, {} if there are none; `ignored_total` counts those beyond MAX_NAMES."""
        names, total = list[str](), 0
        for total, name in enumerate(unknown_fields(body), 1):
            if total <= MAX_NAMES:
                names.append(name)
                self._log(re.sub(r"\.\d+\.", ".*.", name))
        return {"ignored": names, **({"ignored_total": total} if total > MAX_NAMES else {})} if total else {}

    def as_extras(self, body: Body) -> dict[str, Any]:
        """The same as an `x_blendserve` of its own, for responses that have none."""
        ignored = self.ignored(body)
        return {"x_blendserve": ignored} if ignored else {}

    def long_question(self, n_tokens: int, chunk_tokens: int) -> dict[str, Any]:
        """{"hint": advice} for a search query longer than one chunk, which probably contains passages; else {}."""
        if n_tokens <= chunk_tokens:
            return {}
        hint = (
            f"The message has {n_tokens} tokens and was used as the retrieval query. "
            "Send passages in `documents`, or set prompt.separator."
        )
        if not self._hinted:
            self._hinted = True
            log.warning(hint)
        return {"hint": hint}

    def _log(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(name)
            log.warning("request field %r is not supported and was ignored", name)


def has_effect(name: str, value: Any) -> bool:
    """Whether an unknown field asks for something: null and empty values do not."""
    return not (value is None or value in ({}, []) or name in LABELS or value in NEUTRAL.get(name, ()))


def unknown_fields(body: Body, path: str = "") -> Iterator[str]:
    """The paths of a body's unknown fields, such as `messages.0.foo`, each cut to MAX_CHARS characters."""
    for name, value in (body.model_extra or {}).items():
        if has_effect(name, value):
            yield f"{path}{name[:MAX_CHARS]}"[:MAX_CHARS]
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from unknown_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Body):
                    yield from unknown_fields(item, f"{path}{name}.{i}.")
