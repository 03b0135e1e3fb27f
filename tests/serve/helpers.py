"""A toy server: a random reader, passages of its own, KV in memory."""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import uvicorn

from blendserve.config import BlendConfig, Config, DecodeConfig, PromptConfig, StoreConfig, changed
from blendserve.core import Answer, Document, Passage
from blendserve.engine import Engine
from blendserve.models.loader import Reader
from blendserve.models.toy import toy_reader
from blendserve.prompt import PromptBuilder
from blendserve.retrieve import VectorIndex
from blendserve.serve.app import make_app
from blendserve.serve.library import Library
from blendserve.serve.service import Service
from blendserve.serve.settings import ServeConfig
from blendserve.serve.work import Event, Failed, Finished, Piece
from blendserve.store import MemoryStore

CONTEXT = 1024
CONFIG = Config(
    prompt=PromptConfig(system="Be brief.", instruction="Read."),
    store=StoreConfig(kind="memory"),
    blend=BlendConfig(method="blend"),
    decode=DecodeConfig(max_new_tokens=12),
)
PASSAGES = tuple(
    Passage(text, title)
    for title, text in (
        ("Cats", "The cat sat on the mat and looked at the moon, which was round."),
        ("Dogs", "A dog barked at the mailman all morning long, and then it slept."),
        ("Snow", "Snow fell on the hills, and nobody came to the house by the river."),
        ("Bread", "Bread is made of flour, water and salt; it rises when yeast is at work."),
        ("Ships", "The ship left the harbour with nine sailors and a load of timber."),
        ("Clocks", "A clock that has stopped is right twice a day, or so they say."),
    )
)
QUESTIONS = (
    "Who sat on the mat?",
    "What did the dog do in the morning?",
    "Where did the snow fall, and who came?",
    "What is bread made of?",
)


@cache
def reader() -> Reader:
    return toy_reader(CONTEXT)


def engine(config: Config = CONFIG) -> Engine:
    return Engine(config, reader(), MemoryStore(2**30))


class Listener:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.seen: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._events.put(event)

    def next(self) -> Event:
        self.seen.append(self._events.get(timeout=60))
        return self.seen[-1]

    def answer(self) -> Answer:
        """The end of it; raises what failed."""
        while True:
            event = self.next()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                pieces = "".join(e.text for e in self.seen if isinstance(e, Piece))
                assert pieces == event.answer.text
                return event.answer


class WordEmbedder:
    """Vectors by words in common: enough to find passages by, and no model to load."""

    name, fingerprint, dimension, max_tokens = "words", "words-1", 64, 10_000

    dtype = "float32"

    def embed_passages(self, passages: Sequence[Passage], *_: Any) -> tuple[np.ndarray, list[int]]:
        vectors = [self.embed_question(f"{p.title}\n{p.text}") for p in passages]
        return np.stack(vectors), [1] * len(passages)

    def embed_question(self, question: str) -> np.ndarray:
        vector = np.full(self.dimension, 1e-3, np.float32)
        for word in question.lower().split():
            vector[zlib.crc32(word.strip(".,;?").encode()) % self.dimension] += 1
        return vector / np.linalg.norm(vector)


def index(folder: Path, prompts: PromptBuilder, documents: Sequence[Document]) -> VectorIndex:
    """Opened, or made of these documents."""
    of_reader: Any = {
        "reader": reader().name,
        "reader_fingerprint": reader().fingerprint,
        "count": lambda passage: len(prompts.chunk(passage)),
    }
    embedder: Any = WordEmbedder()
    if folder.exists():
        return VectorIndex.open(folder, embedder, **of_reader)
    made = VectorIndex.create(folder, embedder, chunk_tokens=64, **of_reader)
    made.add(documents)
    made.save()
    return made


def library(folder: Path, engine: Engine) -> Library:
    """Two collections, of every other document."""
    found = {name: index(folder / name, engine.prompts, DOCUMENTS[i::2]) for i, name in enumerate("ab")}
    engine.index = found["a"]
    return Library(found)


DOCUMENTS = [Document(p.text, p.title, p.title.lower()) for p in PASSAGES]


class Server:
    """A service behind a real socket, in this process."""

    def __init__(self, folder: Path, serve: ServeConfig, **changes: Any) -> None:
        self.folder, self.serve = folder, serve
        self.engine = engine(changed(CONFIG, **changes))
        self.service = Service(self.engine, library(folder, self.engine), serve)
        config = uvicorn.Config(make_app(self.service), port=0, log_level="warning", lifespan="on")
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run)
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.005)
        port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, body: Any, key: str = "") -> httpx.Response:
        return self.http.post(path, json=body, headers=bearer(key))

    def get(self, path: str, key: str = "") -> httpx.Response:
        return self.http.get(path, headers=bearer(key))

    def job(self, started: httpx.Response, key: str = "") -> dict[str, Any]:
        """A job's end."""
        assert started.status_code == 202, started.text
        for _ in range(2000):
            job: dict[str, Any] = self.get(f"/v1/jobs/{started.json()['id']}", key).json()
            if job["state"] != "running":
                return job
            time.sleep(0.01)
        raise AssertionError(f"the job does not end: {job}")

    def close(self) -> None:
        self.http.close()
        self._uvicorn.should_exit = True
        self._thread.join()
        self.engine.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
