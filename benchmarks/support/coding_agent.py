"""What the tools of a coding agent return, turn by turn, over the source files of an installed package.

A turn reads a file with line numbers, searches for a word, reads a part of a file as JSON, edits a line and is shown its
surroundings, runs a test that fails, or reads the edited part again. Everything follows from the seed.
"""

from __future__ import annotations

import json
import random
import re
from importlib.resources import files

READ_LINES = 60  # lines that a turn reads
AROUND = 12  # lines shown on either side of an edit or of an error
MATCHES = 15  # lines that a search shows
LINES = range(100, 400)  # of a file; others are left out


def source_files(package: str) -> dict[str, str]:
    """The texts of an installed package's modules, by path. Raises ModuleNotFoundError."""
    found = {f"{package}/{file.name}": file for file in files(package).iterdir() if file.name.endswith(".py")}
    texts = {path: found[path].read_text("utf-8").rstrip("\n") for path in sorted(found)}
    return {path: text for path, text in texts.items() if text.count("\n") in LINES}


class CodingAgent:
    """The results of one agent's tools."""

    def __init__(self, sources: dict[str, str], seed: str) -> None:
        self._lines = {path: text.split("\n") for path, text in sources.items()}
        self._drawn = random.Random(seed)
        self._n_turns = 0
        self._path, self._at = "", 0
        self._choose()

    def next_result(self) -> tuple[str, str]:
        """What the agent asks its tool for, and what the tool returns."""
        steps = (self._read, self._search, self._read_json, self._edit, self._test, self._read_again)
        step = steps[self._n_turns % len(steps)]
        self._n_turns += 1
        return step()

    def _choose(self) -> None:
        self._path = self._drawn.choice(list(self._lines))
        self._at = self._drawn.randrange(len(self._lines[self._path]) - READ_LINES)

    def _numbered(self, start: int, stop: int) -> str:
        lines = self._lines[self._path]
        span = range(max(0, start), min(stop, len(lines)))
        return "\n".join(f"{n + 1:6d}\t{lines[n]}" for n in span)

    def _read(self) -> tuple[str, str]:
        self._choose()
        return f"Read {self._path}.", self._numbered(self._at, self._at + READ_LINES)

    def _read_again(self) -> tuple[str, str]:
        return f"Read {self._path} again.", self._numbered(self._at, self._at + READ_LINES)

    def _read_json(self) -> tuple[str, str]:
        self._choose()
        content = "\n".join(self._lines[self._path][self._at : self._at + READ_LINES])
        return f"Get {self._path}.", json.dumps({"path": self._path, "content": content})

    def _search(self) -> tuple[str, str]:
        words = re.findall(r"[a-z_]{6,}", " ".join(self._lines[self._path]))
        word = self._drawn.choice(words)
        found = [
            f"{path}:{n}:{line}"
            for path, lines in self._lines.items()
            for n, line in enumerate(lines, 1)
            if word in line
        ]
        return f"Search for {word}.", "\n".join(found[:MATCHES])

    def _edit(self) -> tuple[str, str]:
        at = self._at + READ_LINES // 2
        self._lines[self._path][at] += f"  # checked in turn {self._n_turns}"
        shown = self._numbered(at - AROUND, at + AROUND)
        return (
            f"Mark line {at + 1}.",
            f"The file {self._path} has been edited. These are its lines now:\n{shown}",
        )

    def _test(self) -> tuple[str, str]:
        lines = self._lines[self._path]
        at = self._at + READ_LINES // 2
        shown = "\n".join(f"    {line}" for line in lines[at - AROUND : at])
        return (
            "Run the tests.",
            f"{self._path}:{at}: in test\n{shown}\n>   {lines[at]}\nE   AssertionError\n1 failed",
        )
