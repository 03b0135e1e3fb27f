"""The toy engine behind HTTP."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import uvicorn

from blendserve.config import changed
from blendserve.core import Document, Passage
from blendserve.engine.engine import Engine
from blendserve.engine.library import Library
from blendserve.engine.prompt import PromptBuilder
from blendserve.engine.scheduler import Scheduler
from blendserve.retrieve import VectorIndex
from blendserve.serve.app import make_app
from blendserve.serve.config import ServeConfig
from blendserve.serve.service import Service
from tests.engine.helpers import CONFIG, PASSAGES, engine, reader


class WordEmbedder:
    """Vectors by words in common: enough to find passages by, and no model to load."""

    name, fingerprint, dimension, max_tokens, dtype = "words", "words-1", 64, 10_000, "float32"

    def let_others(self, go_between: Callable[[], None]) -> None:
        """There is nothing between: it is done at once."""

    def embed_passages(self, passages: Sequence[Passage], *_: Any) -> tuple[np.ndarray, list[int]]:
        vectors = [self.embed_question(f"{p.title}\n{p.text}") for p in passages]
        return np.stack(vectors), [1] * len(passages)

    def embed_question(self, question: str) -> np.ndarray:
        vector = np.full(self.dimension, 1e-3, np.float32)
        for word in question.lower().split():
            vector[zlib.crc32(word.strip(".,;?").encode()) % self.dimension] += 1
        return np.asarray(vector / np.linalg.norm(vector))


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


def hold(scheduler: Scheduler, until: threading.Event) -> None:
    """Keep the model's thread busy until then; it is when this returns, so no request comes before."""
    begun = threading.Event()

    def task() -> None:
        begun.set()
        until.wait(30)

    scheduler.in_background(task)
    assert begun.wait(30)


class Server:
    """A service behind a real socket, in this process, at `serve.port` if that is not the usual one."""

    def __init__(self, folder: Path, serve: ServeConfig, **changes: Any) -> None:
        self.folder, self.serve = folder, serve
        self.engine = engine(changed(CONFIG, **changes))
        self.service = Service(self.engine, library(folder, self.engine), serve)
        port = 0 if serve.port == ServeConfig().port else serve.port
        config = uvicorn.Config(make_app(self.service), port=port, log_level="warning", lifespan="on")
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run)
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.005)
        port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=300)

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
