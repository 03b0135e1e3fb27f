"""The server's log: one JSON object a line, on stderr, with the id of the request that it is about.

A line has the fields that its writer gave as a dictionary, or a message; a bug has its traceback.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the request that this task serves; "" outside of any."""

access = logging.getLogger("blendserve.access")


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        if request := REQUEST.get():
            line["request"] = request
        line |= record.msg if isinstance(record.msg, dict) else {"message": record.getMessage()}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def to_stderr() -> None:
    """One line of JSON for each request and for what goes wrong, in place of what the command line set up."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.getLogger().handlers = [handler]
    access.setLevel(logging.INFO)
