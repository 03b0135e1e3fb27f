"""An index over any history, with kills in the middle of saving, against a dictionary and a loop over all windows."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blendserve.core import Document, Passage, run
from blendserve.errors import (
    CorpusError,
    IndexDamaged,
    IndexMismatch,
    IndexMissing,
    InputError,
    VectorIndexError,
)
from blendserve.retrieve import Embedder, TokenCounter, VectorIndex, read_manifest, split
from blendserve.retrieve import index as retrieve_index
from blendserve.retrieve.contents import PASSAGES, VECTORS
from blendserve.retrieve.index import BUILDING
from blendserve.retrieve.manifest import FORMAT, MANIFEST
from tests.retrieve.conftest import WordEncoder, embed, toy_embedder, windows_of, words

COUNTER = TokenCounter("tiny", "abcdefghij", words)
FILES = [MANIFEST, PASSAGES, VECTORS]
OLD_INDEX = Path(__file__).parent / "index_format_1"  # written by commit 974603a
TOKENS = 20
EMBEDDER = toy_embedder()
# Documents of one, two and four passages, some of several windows; each in two versions.
DOCUMENTS = [
    Document(" ".join(f"w{(n * k + version) % 23}" for k in range(1, size)) + ".", f"T{n}", f"doc{n}")
    for n, size in enumerate((4, 9, 16, 30, 5, 70))
    for version in (0, 1)
]
DOCUMENTS += [Document("w3 w5 of twins", id=name) for name in ("twin2", "twin1", "twin3")]  # of equal texts
NAMES = sorted({document.id for document in DOCUMENTS})


def create(path: Path, kind: Literal["flat", "hnsw"] = "flat") -> VectorIndex:
    return VectorIndex.create(path, EMBEDDER, COUNTER, chunk_tokens=TOKENS, kind=kind)


def reopen(path: Path, embedder: Embedder = EMBEDDER, **changes: Any) -> VectorIndex:
    return VectorIndex.open(path, embedder, replace(COUNTER, **changes))


class Killed(BaseException):
    """Stands for kill -9: nothing of the package catches it."""


FULL = OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def disk_fails_at(step: int, error: BaseException) -> Iterator[None]:
    """In the middle of a write or before a rename, whichever is the step-th of both."""
    steps, rename = count(1), os.replace

    def dying_sync(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode) and next(steps) == step:
            os.ftruncate(handle, os.fstat(handle).st_size // 2)
            raise error

    def dying_rename(source: Path, target: Path) -> None:
        if next(steps) == step:
            raise error
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", dying_sync)
        patch.setattr(os, "replace", dying_rename)
        yield


def assert_search(index: VectorIndex, question: str, *counts: int) -> None:
    """By the definition: the best window of every passage, sorted; of equal passages the first."""
    passages, embedder = index.passages, index.embedder
    query, windows = embed(embedder, [question])[0], [windows_of(embedder, p.text, p.title) for p in passages]
    best = [round(float((embed(embedder, w) @ query).max()), 6) for w in windows]
    ranked = sorted((-score, p.id, p.title, p.text) for score, p in zip(best, passages, strict=True))
    wanted = [each[:2] for n, each in enumerate(ranked) if each[2:] not in [e[2:] for e in ranked[:n]]]
    for k in counts:
        found = index.search(question, k)
        assert [p.id for p in found] == [name for _, name in wanted[:k]]
        assert [-(p.score or 0) for p in found] == pytest.approx([s for s, _ in wanted[:k]], abs=3e-6)


class IndexMachine(RuleBasedStateMachine):
    """`held` is what the index has, in memory and on disk: documents in the order of their passages."""

    @initialize(kind=st.sampled_from(["flat", "hnsw"]), step=st.integers(1, 7))
    def begin(self, kind: Literal["flat", "hnsw"], step: int) -> None:
        self.folder = TemporaryDirectory()
        self.path, self.kind, self.others = Path(self.folder.name) / "index", kind, count()
        self.index = create(self.path, kind)
        self.held: dict[str, Document] = {}
        with suppress(Killed), disk_fails_at(step, Killed()):
            self.index.commit()
        with suppress(IndexMissing):  # as it must be until the manifest is there
            assert reopen(self.path).passages == []
        self.index = create(self.path, kind)
        self.index.commit()

    def after(self, documents: Sequence[Document]) -> dict[str, Document]:
        """What the index has after these were added."""
        new = {d.id: d for d in documents if self.held.get(d.id) != d}
        return {name: d for name, d in self.held.items() if name not in new} | new

    @rule(documents=st.lists(st.sampled_from(DOCUMENTS), max_size=5, unique_by=lambda d: d.id))
    def add(self, documents: list[Document]) -> None:
        n_new = sum(self.held.get(d.id) != d for d in documents)
        before, wanted = self.index.passages, self.after(documents)
        added = self.index.add(documents)
        now, then = set(passages_of(wanted)), set(before)
        assert (added.documents, set(added.passages), set(added.replaced)) == (n_new, now - then, then - now)
        self.held = wanted

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    def delete(self, names: list[str]) -> None:
        assert self.index.delete(*names) == sum(name in self.held for name in names)
        self.held = {name: d for name, d in self.held.items() if name not in names}

    @rule(document=st.sampled_from(DOCUMENTS))
    def fail_to_add(self, document: Document) -> None:
        def interrupt(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.index.add([document, Document("never added before", id="interrupted")], interrupt)
        with pytest.raises(CorpusError):
            self.index.add([Document("one", id=document.id), Document("two", id=document.id)])

    @rule(documents=st.lists(st.sampled_from(DOCUMENTS), max_size=4, unique_by=lambda d: d.id))
    def add_one_by_one(self, documents: list[Document]) -> None:
        """As a server does: documents are embedded one after the other, and saved together."""
        changes = [run(self.index.embed_steps([d])) for d in documents]
        self.index.commit(*changes)
        for d in documents:
            self.held = self.after([d])

    @rule()
    def reopen(self) -> None:
        self.index = reopen(self.path)
        self.index.commit()
        assert [p.name.partition("-")[0] for p in sorted(self.path.iterdir())] == [
            *(".lock", MANIFEST, "passages", "vectors")
        ]

    @rule(document=st.sampled_from(DOCUMENTS), step=st.integers(1, 9))
    def die_while_saving(self, document: Document, step: int) -> None:
        outcomes = [self.held, wanted := self.after([document])]
        with suppress(Killed), disk_fails_at(step, Killed()):
            self.index.add([document])
            outcomes = [wanted]
        self.index = reopen(self.path)
        on_disk = [d for d in outcomes if passages_of(d) == self.index.passages]
        assert on_disk, "neither the old index nor the new one"
        self.held = dict(on_disk[0])

    @rule(document=st.sampled_from(DOCUMENTS), step=st.integers(1, 6), is_gone=st.booleans())
    def change_on_a_full_disk(self, document: Document, step: int, is_gone: bool) -> None:
        """The change is refused, and the index in memory is the one on disk."""
        with suppress(VectorIndexError), disk_fails_at(step, FULL):
            if is_gone:
                self.index.delete(document.id)
            else:
                self.index.add([document])
            assert self.held.get(document.id) == (None if is_gone else document)  # nothing was to be done

    @rule(document=st.sampled_from(DOCUMENTS), is_gone=st.booleans())
    def change_after_another_writer(self, document: Document, is_gone: bool) -> None:
        """The change is made on what the other one has saved."""
        added = Document("w1 from elsewhere", id=f"other{next(self.others)}")
        reopen(self.path).add([added])
        if is_gone:
            n = self.index.delete(document.id)
            wanted = {name: d for name, d in self.held.items() if name != document.id}
        else:
            n = self.index.add([document]).documents
            wanted = self.after([document])
        if not n:
            self.index = reopen(self.path)
        kept = {name: d for name, d in self.held.items() if name in wanted and wanted[name] == d}
        self.held = kept | {added.id: added} | wanted

    @rule()
    def search(self) -> None:
        if self.held:
            assert_search(self.index, "w3 w5 w7", 1, 3, 99)
        else:
            with pytest.raises(IndexMissing):
                self.index.search("w3", 3)

    @invariant()
    def holds_what_was_added(self) -> None:
        assert self.index.passages == reopen(self.path).passages == passages_of(self.held)
        assert [name in self.index for name in NAMES] == [name in self.held for name in NAMES]

    def teardown(self) -> None:
        if hasattr(self, "index"):
            anew = create(self.path / "anew", self.kind)
            anew.add(list(self.held.values()))
            about, wanted = self.index.manifest, anew.manifest
            assert (about.corpus, about.documents) == (wanted.corpus, len(self.held))
            assert (about.passages, about.vectors) == (wanted.passages, wanted.vectors)
            self.folder.cleanup()


def passages_of(documents: dict[str, Document]) -> list[Passage]:
    return [passage for document in documents.values() for passage in split(document, TOKENS, words)]


TestIndexMachine: Any = IndexMachine.TestCase
TestIndexMachine.settings = settings(stateful_step_count=20)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    index = create(tmp_path / "index")
    index.add([Document("Old text one.", "Title", "a"), Document("Line\u2028separator, \x85.\nNew.", id="b")])
    return index.path


def texts(path: Path) -> list[str]:
    return [p.text for p in reopen(path).passages]


def test_an_index_of_another_model_or_format_is_refused(saved: Path) -> None:
    assert read_manifest(saved)[0] == reopen(saved).manifest
    assert len(reopen(saved, model="renamed")) == 2  # the fingerprint decides

    def refused(**other: Any) -> str | None:
        with pytest.raises(IndexMismatch) as error:
            reopen(saved, **other)
        return error.value.setting

    assert refused(fingerprint="zyx") == "model"
    assert refused(embedder=toy_embedder("other", "0123456789")) == "embedder"
    values = json.loads((saved / MANIFEST).read_text())
    (saved / MANIFEST).write_text(json.dumps({**values, "format": FORMAT + 1, "kind": "quantum"}))
    assert refused() == "format"


@pytest.mark.parametrize(("question", "top_k", "setting"), [(" ", 3, "question"), ("w3", 0, "top_k")])
def test_a_search_for_nothing_is_refused(saved: Path, question: str, top_k: int, setting: str) -> None:
    with pytest.raises(InputError) as error:
        reopen(saved).search(question, top_k)
    assert error.value.setting == setting


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *product(FILES, ["missing", "truncated"]),
        *((name, "flipped") for name in FILES[1:]),
        *((FILES[0], raw) for raw in (b"", b"[]", b"{}", b'{"format": "x"}', b'{"format": 1}', b"\xff")),
    ],
)
def test_damage_is_noticed(saved: Path, name: str, damage: str | bytes) -> None:
    path = next(saved.glob(f"{Path(name).stem}*"))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        path.write_bytes(content[:-9] if damage == "truncated" else bytes([content[0] ^ 1]) + content[1:])
    is_missing = (name, damage) == (MANIFEST, "missing")
    with pytest.raises(IndexMissing if is_missing else IndexDamaged) as error:
        reopen(saved)
    assert error.value.path == str(saved if is_missing else saved / name)
    index = create(saved)  # can be built over
    index.add(["fresh"])
    assert texts(saved) == ["fresh"]


def test_a_reader_whom_a_writer_overtakes_sees_the_new_index(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer saves, and deletes the old files, after the reader has read the manifest."""
    writer, read_bytes = reopen(saved), Path.read_bytes

    def overtaken(path: Path) -> bytes:
        if path.suffix == ".jsonl":
            monkeypatch.undo()
            writer.add([Document("New.", id="new")])
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", overtaken)
    assert texts(saved)[-1] == "New."


@pytest.mark.parametrize("killed", [False, True])
def test_an_index_of_format_1_opens_and_becomes_the_newest_when_it_changes(
    tmp_path: Path, killed: bool
) -> None:
    """killed: before the old writer renamed its last file."""
    path = Path(shutil.copytree(OLD_INDEX, tmp_path / "old"))
    if killed:
        (path / VECTORS).rename(path / f"{VECTORS}.new")
        (path / VECTORS).write_bytes(b"of an older index")
    opened, made = reopen(path), create(tmp_path / "new", "hnsw")
    made.add({document.id: document for document in DOCUMENTS}.values())
    made.delete("doc1")
    assert opened.passages == made.passages
    assert opened.manifest.corpus == made.manifest.corpus
    for index in (opened, made):
        assert_search(index, "w3 w5 w7", 1, 3, 99)
    with pytest.raises(VectorIndexError), disk_fails_at(1, FULL):
        opened.add([Document("new text", id="new")])
    assert reopen(path).passages == opened.passages == made.passages
    opened.add([Document("new text", id="new")])
    assert read_manifest(path)[0].format == FORMAT
    assert len(list(path.glob("[!.]*"))) == len(FILES)
    assert texts(path)[-1] == "new text"


TEXTS = [Document(f"text number {n}" + " and on" * (n % 4), id=f"d{n}") for n in range(60)]


def build(path: Path, stop: int = 999, documents: Sequence[Document] = TEXTS, model: str = "toy") -> int:
    """Build an index, killed after `stop` windows -> how many windows were embedded."""
    encoder = WordEncoder()

    def progress(done: int, total: int) -> None:
        if done >= stop:
            raise Killed

    with suppress(Killed):
        embedder = Embedder(encoder, "toy", model)
        VectorIndex.build(path, embedder, COUNTER, documents, progress, chunk_tokens=60)
    return encoder.windows


def test_a_killed_build_continues_after_its_last_batch(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieve_index, "BATCH_WINDOWS", 10)
    path, whole = tmp_path / "killed", tmp_path / "whole"
    n = build(whole)
    first, second, rest = (build(path, stop) for stop in (35, 15, 999))
    assert first + second < n < first + second + rest < n + 25
    assert not (path / BUILDING).exists()
    files = [{p.name: p.read_bytes() for p in folder.glob("*-*")} for folder in (path, whole)]
    assert files[0] == files[1]
    before = texts(saved)
    build(saved, 55)
    assert texts(saved) == before, "the old index stays until the new one is whole"
    assert build(saved, documents=TEXTS[10:]) < n - 40
    assert read_manifest(saved)[0].documents == 50
    build(saved, 55)
    assert build(saved, model="another") == n, "vectors of another model are none of this one"


@pytest.mark.parametrize("copies", [1, 8, 60])
@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_copies_of_a_passage_take_one_place(
    tmp_path: Path, kind: Literal["flat", "hnsw"], copies: int
) -> None:
    index = create(tmp_path / "index", kind)
    same = [Document("w3 w5 w7 and more", "T", f"copy{n:02}") for n in range(copies)]
    others = [Document(f"w3 w5 w{n}", id=f"other{n}") for n in range(4)]
    index.add([*same, *others])
    assert_search(index, "w3 w5 w7", 1, 3, 5)
    assert len(index.search("w3 w5 w7", 5)) == 5
