"""Python's garbage collector, held back while a program starts.

It looks at every object again and again while modules are imported and models made, a seventh of the time, and finds
nothing: all of that stays. Afterwards it need not look at any of it, at exit neither.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Nothing is collected inside; what was made inside is never looked at again. For the start of a program only."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
