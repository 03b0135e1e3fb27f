"""A child process that runs the readers that need a library, one file after the other.

A malicious file may use all time or memory, or crash the library. So the child has an address space of MAX_MEMORY and is
killed after TIMEOUT_S per file; a new child then reads the next file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from blendserve.readers.base import Content, Unreadable, join

MAX_MEMORY = 1_500_000_000  # bytes
TIMEOUT_S = 120.0  # per file; 300 pages of PDF take two seconds
START = "import sys; sys.path[:] = {path!r}; from blendserve.readers.child import main; main()"


class Child:
    """Runs readers in a child process, which starts with the first file."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, target: str, path: Path) -> list[Content]:
        """Return the documents of a file. target: its reader, MODULE:FUNCTION. Raises Unreadable, ModuleNotFoundError."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._timeout_s, process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):  # it has ended, which its output says, too
                process.stdin.write(json.dumps([target, os.fspath(path.absolute())]).encode() + b"\n")
                process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
        if not answer.endswith(b"\n"):
            self.close()
            what = f"took more than {self._timeout_s:g} s" if timed_out else "ended the process that read it"
            raise Unreadable(f"{what}: it may be damaged")
        found = json.loads(answer)
        if "missing" in found:
            raise ModuleNotFoundError(name=found["missing"])
        if "problem" in found:
            raise Unreadable(found["problem"], line=found["line"])
        return [Content(*content) for content in found["contents"]]

    def kill(self) -> None:
        """Kill the process, from any thread. The file that it reads counts as unreadable."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill the process and wait for its end; the next file starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the child. It imports from this process's path, not from the working folder, which is not trusted."""
        command = [sys.executable, "-I", "-c", START.format(path=sys.path)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        return self._process


def main() -> None:
    """Answer requests on stdin, one per line, until it is closed."""
    with suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin.buffer:
        target, path = json.loads(line)
        answers.write(json.dumps(_answer(target, path)).encode() + b"\n")
        answers.flush()


def _answer(target: str, path: str) -> dict[str, Any]:
    module, _, attribute = target.partition(":")
    try:
        contents = list(getattr(import_module(module), attribute)(Path(path)))
        join(content.text for content in contents)  # its limit
        return {"contents": contents}
    except Unreadable as error:
        return {"problem": error.reason, "line": error.line}
    except ModuleNotFoundError as error:
        return {"missing": error.name}
    except MemoryError:
        return {"problem": f"needs more than {MAX_MEMORY / 1e6:,.0f} MB of memory: split it", "line": None}
    except Exception as error:  # libraries raise whatever their parts raise
        text = " ".join(str(error).replace(path, "it").split())[:200]
        return {"problem": f"is damaged, or of another kind ({text or type(error).__name__})", "line": None}
