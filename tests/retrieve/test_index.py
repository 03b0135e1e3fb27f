"""An index over any history, with crashes in a transaction and other processes, against a dictionary and a plain loop."""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

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
from blendserve.retrieve import Embedder, TokenCounter, VectorIndex, database, read_manifest, split, vectors
from blendserve.retrieve import index as retrieve_index
from blendserve.retrieve.database import FILE, LOG_FILES, OLD_FILE
from blendserve.retrieve.index import BUILDING
from blendserve.retrieve.published import to_files
from blendserve.retrieve.tables import FORMAT
from tests.retrieve.conftest import WordEncoder, embed, toy_embedder, windows_of, words

COUNTER = TokenCounter("tiny", "abcdefghij", words)
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


def create(path: Path) -> VectorIndex:
    return VectorIndex.create(path, EMBEDDER, COUNTER, chunk_tokens=TOKENS)


def reopen(path: Path, embedder: Embedder = EMBEDDER, **changes: Any) -> VectorIndex:
    return VectorIndex.open(path, embedder, replace(COUNTER, **changes))


class Killed(BaseException):
    """Stands for kill -9: nothing of the package catches it."""


FULL = sqlite3.OperationalError("database or disk is full")


class Connection(sqlite3.Connection):
    """A connection that calls `before` before each statement."""

    before: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        Connection.before()
        return super().execute(*arguments)


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))


@contextmanager
def fails_at(step: int, error: BaseException, path: Path, copy: Path | None = None) -> Iterator[None]:
    """The step-th statement fails. copy: gets the files as they are at that moment, as a killed process leaves them."""
    steps = count(1)

    def before() -> None:
        if next(steps) == step:
            if copy is not None:
                shutil.copytree(path, copy)
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "before", staticmethod(before))
        yield


def by_vectors(index: VectorIndex, question: str) -> list[float]:
    """By the definition: the best window of every passage."""
    query = embed(index.embedder, [question])[0]
    windows = [windows_of(index.embedder, p.text, p.title) for p in index.passages]
    return [round(float((embed(index.embedder, w) @ query).max()), 6) for w in windows]


def by_words(passages: Sequence[Passage], question: str) -> list[float]:
    """BM25 by the definition."""
    bags = [re.findall(r"\w+", passage.chunk_text.lower()) for passage in passages]
    mean, scores = sum(map(len, bags)) / len(bags), [0.0] * len(bags)
    for word in sorted(set(question.split())):
        df = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
        for n, bag in enumerate(bags):
            tf = bag.count(word)
            scores[n] += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(bag) / mean))
    return [round(score, 6) for score in scores]


def assert_search(index: VectorIndex, question: str, *counts: int) -> None:
    """Passages by both ranks, of equal ones the first; there are fewer than are ranked."""
    passages, cosines = index.passages, by_vectors(index, question)
    texts = {p.id: (p.title, p.text) for p in passages}
    fused = dict.fromkeys(sorted(texts, key=lambda id: (id, texts[id])), 0.0)
    for scores in (cosines, [score or None for score in by_words(passages, question)]):
        pairs = [(-score, p.id) for score, p in zip(scores, passages, strict=True) if score is not None]
        ranked = list(dict.fromkeys(texts[id] for _, id in sorted(pairs)))
        for id in fused:
            fused[id] += 1 / (6 + ranked.index(texts[id])) if texts[id] in ranked else 0
    order = sorted(fused, key=lambda id: (-round(fused[id], 9), id))
    wanted = [id for n, id in enumerate(order) if texts[id] not in [texts[other] for other in order[:n]]]
    score_of = dict(zip((p.id for p in passages), cosines, strict=True))
    for k in counts:
        found = index.search(question, k)
        assert [p.id for p in found] == wanted[:k]
        assert [p.score for p in found] == pytest.approx([score_of[id] for id in wanted[:k]], abs=3e-6)


class IndexMachine(RuleBasedStateMachine):
    """`held` is what the index has: documents in the order of their passages. `reader` is another process's index."""

    @initialize(clustered=st.sampled_from([4, 9, 999]), step=st.integers(1, 25))
    def begin(self, clustered: int, step: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
        self.patch.setattr(vectors, "CLUSTERED", clustered)
        self.folder = TemporaryDirectory()
        self.others, self.lives = count(), count()
        self.path = copy = self.new_path()
        with suppress(Killed), fails_at(step, Killed(), self.path, copy := self.new_path()):
            create(self.path)
        self.path = copy if copy.exists() else self.path
        with suppress(IndexMissing):  # as it must be until it was created
            assert reopen(self.path).passages == []
        self.index = create(self.path)
        self.reader = reopen(self.path)
        self.held: dict[str, Document] = {}

    def new_path(self) -> Path:
        return Path(self.folder.name) / f"life{next(self.lives)}"

    def after(self, documents: Sequence[Document]) -> dict[str, Document]:
        """What the index has after these were added."""
        new = {d.id: d for d in documents if self.held.get(d.id) != d}
        return {name: d for name, d in self.held.items() if name not in new} | new

    @rule(documents=st.lists(st.sampled_from(DOCUMENTS), max_size=5, unique_by=lambda d: d.id))
    def add(self, documents: list[Document]) -> None:
        n_new = sum(self.held.get(d.id) != d for d in documents)
        before, wanted = self.index.passages, self.after(documents)
        n_added, gone = self.index.add(documents)
        assert (n_added, set(gone)) == (n_new, set(before) - set(passages_of(wanted)))
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
    def add_as_a_job(self, documents: list[Document]) -> None:
        """Two servers embed the same documents, then save one after the other; each saves its job with a document."""
        embedded = [run(self.index.embed_steps([d])) for d in documents]
        for n, new in enumerate(embedded):
            job = {"id": "job", "namespace": "", "documents": n}
            before = set(self.index.passages)
            first, second = self.index.commit(new, job), self.reader.commit(new)
            now = set(self.index.passages)
            assert (set(first.passages), set(first.replaced)) == (now - before, before - now)
            assert (first.documents, second.documents) == (len(new), 0)
            assert self.reader.saved_jobs() == [job]
        self.held = self.after(documents)

    @rule()
    def reopen(self) -> None:
        self.index.close()
        self.reader.close()
        assert {path.name for path in self.path.iterdir()} <= {FILE, *LOG_FILES}
        self.index = reopen(self.path)

    @rule(document=st.sampled_from(DOCUMENTS), step=st.integers(1, 40), is_gone=st.booleans())
    def die_in_a_transaction(self, document: Document, step: int, is_gone: bool) -> None:
        wanted = self.after([document])
        if is_gone:
            wanted = {name: d for name, d in self.held.items() if name != document.id}
        outcomes, copy = [self.held, wanted], self.new_path()
        with suppress(Killed), fails_at(step, Killed(), self.path, copy):
            if is_gone:
                self.index.delete(document.id)
            else:
                self.index.add([document])
            outcomes = [wanted]
        self.path = copy if copy.exists() else self.path
        self.index, self.reader = reopen(self.path), reopen(self.path)
        on_disk = [d for d in outcomes if passages_of(d) == self.index.passages]
        assert on_disk, "neither the old index nor the new one"
        self.held = dict(on_disk[0])

    @rule(document=st.sampled_from(DOCUMENTS), step=st.integers(1, 30), is_gone=st.booleans())
    def change_on_a_full_disk(self, document: Document, step: int, is_gone: bool) -> None:
        """The change is refused, and nothing of it stays."""
        wanted = self.held
        with suppress(VectorIndexError), fails_at(step, FULL, self.path):
            if is_gone:
                self.index.delete(document.id)
                wanted = {name: d for name, d in self.held.items() if name != document.id}
            else:
                self.index.add([document])
                wanted = self.after([document])
        self.held = wanted

    @rule(document=st.sampled_from(DOCUMENTS), is_gone=st.booleans())
    def change_after_another_writer(self, document: Document, is_gone: bool) -> None:
        """The change is made on what the other one has saved."""
        added = Document("w1 from elsewhere", id=f"other{next(self.others)}")
        self.reader.add([added])
        self.held = self.after([added])
        if is_gone:
            self.delete([document.id])
        else:
            self.add([document])

    @rule(documents=st.lists(st.sampled_from(DOCUMENTS), max_size=4, unique_by=lambda d: d.id))
    def build_anew(self, documents: list[Document]) -> None:
        """Both processes go on with the new index."""
        VectorIndex.build(self.path, EMBEDDER, COUNTER, documents, chunk_tokens=TOKENS)
        self.held = {d.id: d for d in documents}

    @rule(which=st.sampled_from(["index", "reader"]))
    def search(self, which: str) -> None:
        index = getattr(self, which)
        if self.held:
            assert_search(index, "w3 w5 w7", 1, 3, 99)
        else:
            with pytest.raises(IndexMissing):
                index.search("w3", 3)

    @invariant()
    def holds_what_was_added(self) -> None:
        wanted = passages_of(self.held)
        assert self.index.passages == self.reader.passages == reopen(self.path).passages == wanted
        assert [p for some in self.reader.scan(2) for p in some] == wanted
        assert [name in self.index for name in NAMES] == [name in self.held for name in NAMES]
        assert len(self.reader) == len(wanted)

    def teardown(self) -> None:
        if hasattr(self, "index"):
            anew = create(self.new_path())
            anew.add(list(self.held.values()))
            about, wanted = self.index.manifest, anew.manifest
            assert about == wanted
            assert to_files(self.index)["documents.jsonl"] == to_files(anew)["documents.jsonl"]
            self.folder.cleanup()
            self.patch.undo()


def passages_of(documents: dict[str, Document]) -> list[Passage]:
    return [passage for document in documents.values() for passage in split(document, TOKENS, words)]


TestIndexMachine: Any = IndexMachine.TestCase
TestIndexMachine.settings = settings(stateful_step_count=20)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    index = create(tmp_path / "index")
    index.add(
        [
            Document("Old text one.", "Title", "a"),
            Document("Line\u2028separator, \x85.\nNew.", id="b"),
            Document("New.", id="c"),
        ]
    )
    index.close()
    return index.path


def texts(path: Path) -> list[str]:
    return [p.text for p in reopen(path).passages]


def test_an_index_of_another_model_or_format_is_refused(saved: Path) -> None:
    assert read_manifest(saved) == reopen(saved).manifest
    assert len(reopen(saved, model="renamed")) == 3  # the fingerprint decides

    def refused(**other: Any) -> str | None:
        with pytest.raises(IndexMismatch) as error:
            reopen(saved, **other)
        return error.value.setting

    assert refused(fingerprint="zyx") == "model"
    assert refused(embedder=toy_embedder("other", "0123456789")) == "embedder"
    with reopen(saved).database.write() as rows:
        changed = {"format": FORMAT + 1, "more": "fields"}
        rows.execute("UPDATE manifest SET settings = ?", (json.dumps(changed),))
    assert refused() == "format"


@pytest.mark.parametrize(("question", "top_k", "setting"), [(" ", 3, "question"), ("w3", 0, "top_k")])
def test_a_search_for_nothing_is_refused(saved: Path, question: str, top_k: int, setting: str) -> None:
    with pytest.raises(InputError) as error:
        reopen(saved).search(question, top_k)
    assert error.value.setting == setting


def test_an_index_of_an_earlier_blendserve_names_the_command_that_builds_it_anew(tmp_path: Path) -> None:
    (tmp_path / OLD_FILE).write_text("{}")
    for read in (read_manifest, reopen):
        with pytest.raises(IndexMismatch, match="blendserve index build"):  # allow: the remedy is the point
            read(tmp_path)
    VectorIndex.build(tmp_path, EMBEDDER, COUNTER, ["fresh"], chunk_tokens=TOKENS)
    assert texts(tmp_path) == ["fresh"]


def flip(content: bytes, part: bytes) -> bytes:
    return content.replace(part, bytes([part[0] ^ 1]) + part[1:])


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "truncated": lambda content, vector: content[: len(content) // 2],
    "another file": lambda content, vector: b"no database" * 1000,
    "flipped text": lambda content, vector: flip(content, b"Old text one."),
    "flipped vector": flip,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_noticed(saved: Path, damage: Callable[[bytes, bytes], bytes]) -> None:
    file, vectors = saved / FILE, to_files(reopen(saved))["vectors.f32"]
    content = file.read_bytes()
    file.write_bytes(damage(content, vectors[:16]))
    assert file.read_bytes() != content
    with pytest.raises(IndexDamaged) as error:
        reopen(saved).search("old text", 9)
    assert error.value.path == str(file)
    VectorIndex.build(saved, EMBEDDER, COUNTER, ["fresh"], chunk_tokens=TOKENS)  # can be built over
    assert texts(saved) == ["fresh"]


@pytest.mark.parametrize("left", [None, b""])
def test_without_its_file_an_index_is_missing(saved: Path, left: bytes | None) -> None:
    (saved / FILE).unlink()
    if left is not None:
        (saved / FILE).write_bytes(left)
    with pytest.raises(IndexMissing) as error:
        reopen(saved)
    assert error.value.path == str(saved)


def test_a_folder_that_takes_the_place_of_an_index_is_read_and_written(saved: Path, tmp_path: Path) -> None:
    index = reopen(saved)
    other = create(tmp_path / "other")
    other.add([Document("Of the other one.", id="other")])
    other.close()
    saved.rename(tmp_path / "away")
    with pytest.raises(IndexMissing):
        index.add([Document("Lost?", id="lost")])
    other.path.rename(saved)
    index.add([Document("Kept.", id="kept")])
    assert texts(saved) == ["Of the other one.", "Kept."]
    assert [p.doc_id for p in index.search("kept", 9)] == [p.doc_id for p in reopen(saved).search("kept", 9)]


def test_an_index_in_a_folder_that_cannot_be_written_is_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere: `access` says what it says to others."""
    monkeypatch.setattr("os.access", lambda *_: False)
    index = reopen(saved)
    assert len(index.search("old text", 9)) == 3
    with pytest.raises(VectorIndexError):
        index.add(["new"])
    assert {path.name for path in saved.iterdir()} == {FILE}


def test_another_process_waits_for_a_writer_and_says_so(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_TIMEOUT_S", 0.01)
    with reopen(saved).database.write():
        assert len(reopen(saved).search("old text", 9)) == 3, "readers do not wait"
        with pytest.raises(VectorIndexError, match="another process"):  # allow: the cause is the point
            reopen(saved).add(["new"])
    assert reopen(saved).add(["new"])[0] == 1


def test_an_index_is_built_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_TIMEOUT_S", 0.01)
    refused = list[VectorIndexError]()

    def progress(done: int, total: int) -> None:
        with pytest.raises(VectorIndexError) as error:
            VectorIndex.build(tmp_path, EMBEDDER, COUNTER, ["b"], chunk_tokens=TOKENS)
        refused.append(error.value)

    VectorIndex.build(tmp_path, EMBEDDER, COUNTER, ["a"], progress, chunk_tokens=TOKENS)
    assert refused
    assert texts(tmp_path) == ["a"]


def test_a_build_with_another_model_is_noticed_by_who_has_the_old_index_open(saved: Path) -> None:
    index, other = reopen(saved), TokenCounter("other", "0123456789", words)
    VectorIndex.build(saved, EMBEDDER, other, ["a"], chunk_tokens=TOKENS)
    with pytest.raises(IndexMismatch):
        index.search("a", 1)


def test_deleting_one_document_writes_little_and_its_text_is_gone(tmp_path: Path) -> None:
    index = create(tmp_path)
    index.add([Document(f"secret{n} " + "some more words " * 9, id=f"d{n}") for n in range(1000)])
    index.close()
    whole, log = (tmp_path / FILE).stat().st_size, tmp_path / f"{FILE}-wal"
    index = reopen(tmp_path)
    index.delete("d500")
    assert 0 < log.stat().st_size < whole / 10
    index.close()
    assert b"secret500 " not in (tmp_path / FILE).read_bytes()
    assert b"secret501 " in (tmp_path / FILE).read_bytes()


TEXTS = [Document(f"text number {n}" + " and on" * (n % 4), id=f"d{n}") for n in range(60)]


def build(path: Path, stop: int = 10**6, documents: Sequence[Document] = TEXTS, model: str = "toy") -> int:
    """Build an index, killed after `stop` characters -> how many windows were embedded."""
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
    monkeypatch.setattr(retrieve_index, "BATCH", 100)
    path, whole = tmp_path / "killed", tmp_path / "whole"
    n = build(whole)
    first, second, rest = (build(path, stop) for stop in (800, 350, 10**6))
    assert first + second < n < first + second + rest < n + 25
    assert not (path / BUILDING).exists()
    assert to_files(reopen(path)) == to_files(reopen(whole))
    before = texts(saved)
    build(saved, 1200)
    assert texts(saved) == before, "the old index stays until the new one is whole"
    assert build(saved, documents=TEXTS[10:]) < n - 40
    assert read_manifest(saved).documents == 50
    build(saved, 1200)
    assert build(saved, model="another") == n, "vectors of another model are none of this one"


@pytest.mark.parametrize("copies", [1, 8, 60])
@pytest.mark.parametrize("clustered", [4, 999])
def test_copies_of_a_passage_take_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clustered: int, copies: int
) -> None:
    monkeypatch.setattr(vectors, "CLUSTERED", clustered)
    index = create(tmp_path / "index")
    same = [Document("w3 w5 w7 and more", "T", f"copy{n:02}") for n in range(copies)]
    others = [Document(f"w3 w5 w{n}", id=f"other{n}") for n in range(4)]
    index.add([*same, *others])
    assert_search(index, "w3 w5 w7", 1, 3, 5)
    assert len(index.search("w3 w5 w7", 5)) == 5
