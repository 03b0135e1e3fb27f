"""What the short runs share."""

from __future__ import annotations

import json
from typing import Any


def last_line(text: str) -> dict[str, Any]:
    """The verdict that a run prints at its end."""
    result: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return result
