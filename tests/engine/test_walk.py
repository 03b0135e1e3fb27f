"""The way of a prompt: the files that `Engine.answer` enters, in order, as docs/explanation/architecture.md lists them.

A stay begins when a function is called from another file, the first time that this function is called. Methods of
dataclasses (prompts, layouts, plans) read a value and are none. What lies behind a call into a side room is not counted;
the calls that may enter one are listed here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import blendserve
from blendserve.blend import planner
from blendserve.blend.layout import Layout
from blendserve.engine.engine import Engine
from tests.support.engines import QUESTIONS, toy_engine
from tests.support.http import DOCUMENTS, index
from tests.support.kernels import threads

MAX_FILES, MAX_STAYS = 10, 12
PACKAGE = Path(blendserve.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "architecture.md"
GROUND = ("core.py", "config/", "timing.py", "registry.py", "errors.py")  # nouns, settings and names
SIDE_ROOMS = {
    "retrieve/": {"search"},
    "engine/gate.py": {"passed"},
    "blend/prefix_cache.py": {"get"},
    "blend/keys.py": {"__call__"},
    "blend/priors.py": {"current"},
    "blend/loader.py": {"__init__", "place", "read_s", "close"},
    "blend/policies/": {"make_policy", "validate", "is_scored", "select", "check_layers"},
    "blend/scoring.py": {"suffix_scores"},
    "blend/corrections/": {"__init__", "apply"},
    "fetch/": {"fetch", "waited_s", "record", "record_reading"},
    "store/": {"__init__"},
    "kernels/": {"on", "at", "last", "__len__", "plans_by_window", "__call__"},
    "models/model.py": {
        "device",
        "windows",
        "group",
        "rope",
        "embed",
        "project",
        "rotate",
        "finish",
        "logits",
    },
    "models/kv_cache.py": {"__init__", "write"},
    "models/native.py": {"native_layers"},
    "models/thread_tuner.py": {"layer_series"},
    "models/runner.py": {"over", "step", "draft_room"},
}

Stay = tuple[str, str]


class Walk:
    """Records the stays of a call in this thread, and the calls that enter side rooms."""

    def __init__(self) -> None:
        self.stays: list[Stay] = []
        self.entered: dict[str, set[str]] = {}
        self._seen = set[CodeType]()
        self._room: FrameType | None = None

    def record(self, call: Callable[[], Any]) -> Walk:
        sys.setprofile(self._trace)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.stays}

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame is self._room:
            self._room = None
        file, call = file_of(frame), frame.f_code.co_name
        if event != "call" or self._room or not file or file.startswith(GROUND):
            return
        if room := next((room for room in SIDE_ROOMS if file.startswith(room)), None):
            self._room = frame
            self.entered.setdefault(room, set()).add(call)
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


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """With several threads, the number that a layer uses is tried anew at run time: another way through the files."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """With an index whose chunks are stored."""
    made = toy_engine()
    made.index = index(tmp_path_factory.mktemp("walk") / "index", made.prompts, DOCUMENTS)
    made.precompute()
    made.answer(QUESTIONS[0], max_new_tokens=2)  # registries have loaded their classes
    return made


def listed() -> list[Stay]:
    """The table on the page: a number, a file and a call in each row."""
    text = PAGE.read_text("utf-8")
    rows: list[Stay] = re.findall(r"^\| \d+ \| `(\S+\.py)` \| `(\w+)` \|$", text, re.MULTILINE)
    return rows


def walk(engine: Engine) -> Walk:
    with threads(1):  # with more, the layers of a short pass run behind models/thread_tuner.py
        return Walk().record(lambda: engine.answer(QUESTIONS[0], max_new_tokens=2))


def test_an_answer_takes_the_way_that_the_page_lists(engine: Engine) -> None:
    way = walk(engine)
    assert way.stays == listed()
    assert len(way.files) <= MAX_FILES
    assert len(way.stays) <= MAX_STAYS
    assert way.entered == SIDE_ROOMS


def test_a_detour_and_another_door_to_a_side_room_are_seen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, plan = walk(engine).stays, planner.Planner.plan

    def detour(self: Any, layout: Layout, blend: Any) -> Any:
        planner.choose_method({"full": 1.0, "blend": 2.0})  # called from this file: a second stay
        engine.fetcher.resident()
        return plan(self, layout, blend)

    monkeypatch.setattr(planner.Planner, "plan", detour)
    way = walk(engine)
    assert way.stays != usual
    assert way.entered != SIDE_ROOMS
