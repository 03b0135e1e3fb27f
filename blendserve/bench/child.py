"""A process that a bench starts: it is told its task by lines of JSON, and answers by such lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from blendserve.errors import BlendserveError


def say(value: Any) -> None:
    """A line to whoever started this process."""
    print(json.dumps(value), flush=True)


def run(main: Callable[[], None]) -> None:
    """All of the process; what a user could mend ends it with that message."""
    try:
        main()
    except BlendserveError as error:
        sys.exit(f"{error}")
