"""The command line: each command parses, calls and prints; all logic is in the package.

app.py      the file of each command, errors to exit codes     options.py    settings as options
core.py     demo, index, precompute, ask                       server.py     serve, keys
store.py    store, codec                                       kdn.py kdn
research.py evaluate, simulate, cost, doctor                   bench.py      bench
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

__all__ = ["main"]
_was_interrupted = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, the process's own for None, and return its exit code.

    Ctrl-C at any moment is one line and 130: also in the imports, whose libraries turn it into errors of their own.
    """
    global _was_interrupted
    _was_interrupted = False
    if (
        argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # not where it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from blendserve.cli.app import app, run  # here, as Ctrl-C may come while it is imported

        return run(app, argv)
    except BaseException as error:
        if not (_was_interrupted or isinstance(error, KeyboardInterrupt)):
            raise
        print("stopped", file=sys.stderr)
        return 130


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """The first Ctrl-C ends the command, a second one the process."""
    global _was_interrupted
    _was_interrupted = True
    signal.signal(signum, signal.SIG_DFL)
    raise KeyboardInterrupt
