"""A run of embedding that was killed goes on where it stopped, and trusts no damaged record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from blendserve.core import Passage
from blendserve.retrieve import Embedder, VectorIndex, kept
from blendserve.retrieve.encoder import Window
from blendserve.retrieve.index import EMBEDDING
from tests.retrieve.conftest import words

PASSAGES = [Passage(f"This is text number {n}" + " and on" * (n % 7)) for n in range(60)]


class Meter:
    """An encoder that says how many windows it read, a few at a time."""

    batch_tokens = 100

    def __init__(self, encoder: Any) -> None:
        self._encoder, self.windows = encoder, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode(self, windows: list[Window], of_question: bool) -> np.ndarray:
        self.windows += len(windows)
        vectors: np.ndarray = self._encoder.encode(windows, of_question)
        return vectors


@pytest.fixture
def meter(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> Meter:
    monkeypatch.setattr(kept, "LEAST", 20)
    return Meter(embedder._encoder)


def run(
    meter: Any, file: Path | None, stop: int | None = None, fingerprint: str = "f"
) -> tuple[np.ndarray, int]:
    """Embed, perhaps killed after `stop` windows -> vectors and how many windows were read for them."""
    before = meter.windows

    def progress(done: int, total: int) -> None:
        if stop is not None and done >= stop:
            raise KeyboardInterrupt

    vectors, _ = Embedder(meter, "meter", fingerprint).embed_passages(PASSAGES, progress, file)
    return vectors, meter.windows - before


def killed(meter: Meter, file: Path, stop: int) -> int:
    before = meter.windows
    with pytest.raises(KeyboardInterrupt):
        run(meter, file, stop)
    return meter.windows - before


def test_a_killed_run_goes_on(meter: Meter, tmp_path: Path) -> None:
    wanted, n = run(meter, None)
    assert n == len(PASSAGES)
    file = tmp_path / "new" / "part"
    first = killed(meter, file, 15)
    second = killed(meter, file, 40)
    vectors, rest = run(meter, file)
    assert 15 <= first < first + second < len(PASSAGES)
    assert first + second + rest == len(PASSAGES)
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)
    assert run(meter, file)[1] == 0
    assert run(meter, file, fingerprint="another model")[1] == len(PASSAGES)


def test_damaged_records_are_computed_again(meter: Meter, tmp_path: Path) -> None:
    file = tmp_path / "part"
    wanted, _ = run(meter, file)
    raw = bytearray(file.read_bytes())
    size = len(raw) // len(PASSAGES)
    raw[5 * size + 100] ^= 1  # in a vector
    raw[9 * size + 3] ^= 1  # in a key
    raw[11 * size + 17] ^= 1  # in a check
    file.write_bytes(raw[: -size // 2])  # and the last one is half there
    vectors, n = run(meter, file)
    assert n == 4
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)
    assert run(meter, file)[1] == 0  # what came anew counts


def test_what_cannot_be_kept_is_embedded_all_the_same(
    meter: Meter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = run(meter, None)
    file = tmp_path / "part"
    with FileLock(tmp_path / ".part.lock"):  # another process is embedding into it
        vectors, _ = run(meter, file)
    assert not file.exists()
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)
    (tmp_path / "file").write_text("")
    assert run(meter, tmp_path / "file" / "part")[1] == len(PASSAGES)  # no folder can be made there
    monkeypatch.setattr(kept, "LEAST", 1000)
    run(meter, file)
    assert not file.exists()  # so few are not worth it


def test_an_index_keeps_until_it_is_saved(meter: Any, tmp_path: Path) -> None:
    def index() -> VectorIndex:
        return VectorIndex.create(
            tmp_path / "index",
            Embedder(meter, "meter", "f"),
            chunk_tokens=60,
            count=words,
            reader="r",
            reader_fingerprint="r",
        )

    def progress(done: int, total: int) -> None:
        if done >= 30:
            raise KeyboardInterrupt

    texts = [p.text for p in PASSAGES]
    with pytest.raises(KeyboardInterrupt):
        index().add(texts, progress)
    assert (tmp_path / "index" / EMBEDDING).exists()
    made = index()
    made.add(texts)
    assert meter.windows == len(texts)
    made.save()
    assert not list((tmp_path / "index").glob("*embedding*"))
    assert (
        len(VectorIndex.open(made.path, made.embedder, count=words, reader="r", reader_fingerprint="r")) == 60
    )
