"""Log messages that are given once. Their texts may name anything, so only the last ones are remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict

MOST = 256


class LastMessages:
    """The last messages. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._seen = OrderedDict[str, None]()
        self._lock = threading.Lock()

    def is_new(self, message: str) -> bool:
        """Whether it is none of the last ones; from now on it is."""
        with self._lock:
            is_new = message not in self._seen
            self._seen[message] = None
            self._seen.move_to_end(message)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
            return is_new
