"""The way of a prompt: the files that `Engine.answer` enters, in order, as docs/explanation/architecture.md lists them.

A stay begins when a function is called from another file, the first time that this function is called. Methods of
dataclasses (prompts, layouts, plans) read a value and are none. What lies behind a call into a side room is not counted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import blendserve
from tests.support.engines import QUESTIONS, toy_engine
from tests.support.http import DOCUMENTS, index
from tests.support.kernel_switches import threads

MAX_FILES, MAX_STAYS = 10, 12
PACKAGE = Path(blendserve.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "architecture.md"
# nouns, settings and names
GROUND = (
    "core.py",
    "config/",
    "timing.py",
    "registry.py",
    "errors.py",
    "forks.py",
)
SIDE_ROOMS = (
    *("retrieve/", "fetch/", "store/", "kernels/", "quality/", "blend/prefix_cache.py"),
    *("engine/arguments.py", "engine/gate.py", "engine/sampler.py"),
    *("blend/priors.py", "blend/loader.py", "blend/policies.py", "blend/corrections.py"),
    *("models/model.py", "models/kv_cache.py"),
    *("models/native.py", "models/thread_tuner.py", "models/runner.py"),
)
Stay = tuple[str, str]  # file, function


class Walk:
    """Records the stays of a call in this thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.stays: list[Stay] = []
        self._seen = set[CodeType]()
        self._room: FrameType | None = None  # the call into a side room
        sys.setprofile(self._trace)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame is self._room:
            self._room = None
        file, call = file_of(frame), frame.f_code.co_name
        if event != "call" or self._room or not file or file.startswith(GROUND):
            return
        if file.startswith(SIDE_ROOMS):
            self._room = frame
        elif frame.f_code not in self._seen and not is_dataclass(frame.f_locals.get("self")):
            self._seen.add(frame.f_code)
            is_entry = file != caller_file(frame) and not call.startswith("<")
            if is_entry and (not self.stays or self.stays[-1][0] != file):
                self.stays.append((file, call))


def file_of(frame: FrameType) -> str:
    """Within the package, "" outside of it."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if PACKAGE in path.parents else ""


def caller_file(frame: FrameType) -> str:
    """Of the nearest caller that is neither ground nor outside of the package."""
    caller = frame.f_back
    while caller and (not file_of(caller) or file_of(caller).startswith(GROUND)):
        caller = caller.f_back
    return file_of(caller) if caller else ""


def test_an_answer_takes_the_way_that_the_page_lists(tmp_path: Path) -> None:
    """Over an index whose chunks are stored."""
    engine = toy_engine()
    engine.index = index(tmp_path / "index", engine.prompts, DOCUMENTS)
    engine.precompute()
    engine.answer(QUESTIONS[0], max_new_tokens=2)  # registries have loaded their classes
    with threads(1):  # with more, the number that a layer uses is tried anew at run time: another way
        stays = Walk(lambda: engine.answer(QUESTIONS[0], max_new_tokens=2)).stays
    rows = re.findall(r"^\| \d+ \| `(\S+\.py)` \| `(\w+)` \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert stays == rows
    assert len({file for file, _ in stays}) <= MAX_FILES
    assert len(stays) <= MAX_STAYS
