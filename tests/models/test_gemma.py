"""Gemma 3 270M end to end: windows, two kinds of RoPE and norms of queries and keys, on real weights.

Its packages are optional, 253 MB, and under the Gemma Terms of Use (https://ai.google.dev/gemma/terms).
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from blendserve.config import Config, ReaderConfig
from blendserve.core import Passage, Prompt
from blendserve.engine import gate
from blendserve.engine.engine import Engine
from blendserve.models.loader import BUNDLED, Reader, load_reader
from blendserve.store import MemoryStore

NAME, WINDOW = "gemma3-270m", 512
MODEL = BUNDLED[NAME]
MISSING = [part for part in MODEL.parts if importlib.util.find_spec(part) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} missing: {MODEL.install}"),
]
PASSAGES = [Passage(topics[name][:1200], name) for name in ("with", "for", "lambda", "try")]


def load(dtype: str, model: str = NAME) -> Reader:
    return load_reader(ReaderConfig(model=model, dtype=dtype, device="cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_passes_with_a_prompt_longer_than_the_window(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, examine = list[int](), gate.examine

    def noting(adapter: Any, prompt: Prompt, following: int) -> Any:
        lengths.append(len(prompt))
        return examine(adapter, prompt, following)

    monkeypatch.setattr(gate, "examine", noting)
    reader = load(dtype)
    report = gate.check(reader)
    assert report.passed, report.failure
    assert WINDOW in reader.adapter.windows
    assert lengths[0] > WINDOW


def test_a_blended_answer_to_a_prompt_longer_than_the_window() -> None:
    with Engine(Config(), load("bfloat16"), MemoryStore(1 << 30)) as engine:
        engine.precompute(PASSAGES)
        question = "What does the with statement do?"
        answer = engine.answer(question, PASSAGES, method="blend", ratio=0.15, max_new_tokens=8)
    assert answer.report.blended
    assert answer.report.chunks_hit == len(PASSAGES)
    assert answer.report.tokens_prompt > WINDOW
    assert answer.text


def test_the_packages_file_is_undamaged_and_has_the_same_fingerprint_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / MODEL.gguf
    with file.open("wb") as whole:
        for part in MODEL.parts:
            folder = Path(str(importlib.util.find_spec(part).origin)).parent  # type: ignore[union-attr]
            whole.writelines(piece.read_bytes() for piece in sorted(folder.rglob(f"{MODEL.gguf}*")))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == MODEL.sha256
    assert load("bfloat16", str(file)).fingerprint == load("bfloat16").fingerprint
