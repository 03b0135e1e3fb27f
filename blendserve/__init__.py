"""blendserve: retrieval-augmented generation that reads nothing twice.

    question -> retrieve -> store (load KV) -> blend (prefill) -> decode -> answer

The KV cache of every text chunk is computed once and kept; any question over any chunks in any order is answered by
blending those caches and recomputing the few tokens that matter (CacheBlend, arXiv 2405.16444).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import blendserve.threads  # noqa: F401  before anything that loads torch: its OpenMP reads its environment once
from blendserve.cpu_cap import tell_libraries

if TYPE_CHECKING:
    from blendserve.answer import Answer, Timings
    from blendserve.config import Config
    from blendserve.core import BlendReport, Document, Passage
    from blendserve.engine.engine import Engine
    from blendserve.engine.generate import AnswerStream
    from blendserve.errors import BlendserveError

tell_libraries()  # before anything imports torch

__version__ = "0.2.0"
__all__ = [
    "Answer",
    "AnswerStream",
    "BlendReport",
    "BlendserveError",
    "Config",
    "Document",
    "Engine",
    "Passage",
    "Timings",
]

_ROOMS = {
    "answer": ("Answer", "Timings"),
    "core": ("BlendReport", "Document", "Passage"),
    "config": ("Config",),
    "engine.engine": ("Engine",),
    "errors": ("BlendserveError",),
    "engine.generate": ("AnswerStream",),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes a second, and `blendserve --help` should not."""
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"blendserve.{room}"), name)
    raise AttributeError(f"module 'blendserve' has no attribute {name!r}")
