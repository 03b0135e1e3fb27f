"""What lies on disk is the old index or the new one, after a kill at any step, or is refused by name."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blendserve.core import Document
from blendserve.errors import IndexDamaged, IndexMismatch, IndexMissing, VectorIndexError
from blendserve.retrieve import Embedder, VectorIndex, manifest, read_manifest
from tests.retrieve.conftest import words

READER: dict[str, Any] = {"reader": "tiny", "reader_fingerprint": "abcdefghij"}
OLD = [
    Document("Old text one.", "Title", "a"),
    Document("Line\u2028separator, \x85 and \\n.\nNew line.", id="b"),
]
FILES = ["manifest.json", "passages.jsonl", "vectors.faiss"]


def opened(path: Path, embedder: Embedder, **changes: Any) -> VectorIndex:
    return VectorIndex.open(path, embedder, count=words, **{**READER, **changes})


@pytest.fixture
def saved(tmp_path: Path, embedder: Embedder) -> Path:
    index = VectorIndex.create(tmp_path / "index", embedder, chunk_tokens=50, count=words, **READER)
    index.add(OLD)
    index.save()
    return index.path


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


def die_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Die in the middle of the step-th write or right before the step-th rename; tells how many steps were done."""
    done = 0
    write, rename = manifest._write_synced, os.replace

    def dying_write(path: Path, content: bytes) -> None:
        nonlocal done
        done += 1
        if done == step:
            path.write_bytes(content[: len(content) // 2])
            raise Killed
        write(path, content)

    def dying_rename(source: Path, target: Path) -> None:
        nonlocal done
        done += 1
        if done == step:
            raise Killed
        rename(source, target)

    monkeypatch.setattr(manifest, "_write_synced", dying_write)
    monkeypatch.setattr(os, "replace", dying_rename)
    return lambda: done


def texts(index: VectorIndex) -> list[str]:
    return [p.text for p in index.passages]


def test_a_kill_at_any_step_leaves_the_old_index_or_the_new_one(saved: Path, embedder: Embedder) -> None:
    old, outcomes = texts(opened(saved, embedder)), []
    for step in range(1, 20):
        folder = shutil.copytree(saved, saved.parent / f"copy{step}")
        index = opened(folder, embedder)
        index.add(["New text."])
        new = texts(index)
        with pytest.MonkeyPatch.context() as patch:
            die_at(step, patch)
            try:
                index.save()
                finished = True
            except Killed:
                finished = False
        after = opened(folder, embedder)
        assert texts(after) in (old, new)
        assert len(after.search("text", 9)) == len(after)
        outcomes.append(texts(after) == new)
        after.add(["And more."])  # the next writer clears up
        after.save()
        assert texts(opened(folder, embedder))[-1] == "And more."
        assert sorted(p.name for p in folder.iterdir()) == [".lock", *FILES]
        if finished:
            break
    assert step == 7  # three writes, three renames, then none was left to die in
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) == 4  # up to and with the manifest's own rename


def test_a_kill_while_first_saving_leaves_no_index(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = VectorIndex.create(tmp_path / "i", embedder, chunk_tokens=50, count=words, **READER)
    with monkeypatch.context() as patch:
        die_at(2, patch)
        with pytest.raises(Killed):
            index.save()
    with pytest.raises(IndexMissing, match="build one with `blendserve index build`"):
        opened(tmp_path / "i", embedder)
    index.save()
    assert texts(opened(tmp_path / "i", embedder)) == []


def test_a_writer_killed_after_another_killed_writer_loses_nothing(saved: Path, embedder: Embedder) -> None:
    """The first dies when only the manifest is new, so that its .new files are the index; the second while writing."""
    for text, step in (("committed", 4), ("lost", 1)):
        index = opened(saved, embedder)
        index.add([text])
        with pytest.MonkeyPatch.context() as patch:
            die_at(step + 1, patch)
            with pytest.raises(Killed):
                index.save()
    assert texts(opened(saved, embedder))[2:] == ["committed"]


def test_saved_is_what_is_opened(saved: Path, embedder: Embedder) -> None:
    index = opened(saved, embedder)
    assert [(p.doc_id, p.title, p.text) for p in index.passages] == [(d.id, d.title, d.text) for d in OLD]
    found, _ = read_manifest(saved)
    assert found == index.manifest
    assert (found.embedder, found.embedder_fingerprint) == (embedder.name, embedder.fingerprint)
    assert (found.reader, found.chunk_tokens, found.documents, found.dimension) == (
        "tiny",
        50,
        2,
        embedder.dimension,
    )


def test_another_embedder_or_reader_is_refused(saved: Path, embedder: Embedder) -> None:
    with pytest.raises(IndexMismatch, match=r"reader 'tiny' \(abcdefgh\), not with 'big' \(zyx\).*rebuild"):
        opened(saved, embedder, reader="big", reader_fingerprint="zyx")
    other = Embedder(embedder._encoder, "other", "0123456789")
    with pytest.raises(IndexMismatch, match=r"embedder 'minilm-l6' \(\w{8}\), not with 'other' \(01234567\)"):
        opened(saved, other)
    assert len(opened(saved, embedder, reader="renamed")) == 2  # the fingerprint decides


@pytest.mark.parametrize(
    ("name", "damage"),
    [*itertools.product(FILES, ["missing", "truncated"]), *((name, "flipped") for name in FILES[1:])],
)
def test_damage_is_noticed(saved: Path, embedder: Embedder, name: str, damage: str) -> None:
    path = saved / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if damage == "truncated" else bytes([content[0] ^ 1]) + content[1:])
    expected = IndexMissing if (name, damage) == ("manifest.json", "missing") else VectorIndexError
    with pytest.raises(expected, match=r"blendserve index build"):
        opened(saved, embedder)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"format": "x"}', b'{"format": 1}', b"\xff"])
def test_a_manifest_of_nonsense_is_damage(saved: Path, embedder: Embedder, raw: bytes) -> None:
    (saved / "manifest.json").write_bytes(raw)
    with pytest.raises(IndexDamaged, match=r"manifest\.json cannot be understood: rebuild"):
        opened(saved, embedder)


def test_a_newer_format_is_refused(saved: Path, embedder: Embedder) -> None:
    values = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**values, "format": 2, "kind": "quantum"}))
    with pytest.raises(IndexMismatch, match="has format 2, this blendserve reads up to 1: update"):
        opened(saved, embedder)


def test_the_slower_of_two_writers_is_told(saved: Path, embedder: Embedder) -> None:
    first, second = opened(saved, embedder), opened(saved, embedder)
    first.add(["from the first"])
    second.add(["from the second"])
    first.save()
    with pytest.raises(VectorIndexError, match="changed by another process meanwhile"):
        second.save()
    assert texts(opened(saved, embedder))[-1] == "from the first"


def test_readers_never_see_a_half_written_index(saved: Path, embedder: Embedder) -> None:
    writer = opened(saved, embedder)

    def rewrite() -> None:
        for n in range(25):
            writer.add([Document(f"Version {n}.", id="changing")])
            writer.save()

    thread = threading.Thread(target=rewrite)
    thread.start()
    seen = []
    while thread.is_alive():
        seen.append(texts(opened(saved, embedder))[-1])
    thread.join()
    assert texts(opened(saved, embedder))[-1] == "Version 24."
    assert len(set(seen)) > 3


def test_a_damaged_index_can_be_built_over(saved: Path, embedder: Embedder) -> None:
    (saved / "manifest.json").write_text("nonsense")
    index = VectorIndex.create(saved, embedder, chunk_tokens=50, count=words, **READER)
    index.add(["fresh"])
    index.save()
    assert texts(opened(saved, embedder)) == ["fresh"]


def test_a_folder_that_cannot_be_written_is_named(saved: Path, embedder: Embedder) -> None:
    index = VectorIndex.create(
        saved / "passages.jsonl" / "below", embedder, chunk_tokens=50, count=words, **READER
    )
    with pytest.raises(
        VectorIndexError, match=r"cannot be written \(Not a directory\).*choose another folder"
    ):
        index.save()


def test_a_full_disk_leaves_the_old_index(
    saved: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = opened(saved, embedder)
    index.add(["too much"])

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            VectorIndexError, match=r"No space left on device\), what was there is unchanged: make room"
        ):
            index.save()
    assert len(opened(saved, embedder)) == 2
    assert not list(saved.glob("*.new"))
    index.save()
    assert len(opened(saved, embedder)) == 3
