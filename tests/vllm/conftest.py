"""These tests need vLLM, which has an environment of its own: `make test-vllm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from blendserve.core import TokenIds
from tests.support.vllm import Own, Served, make_model, serving, words


@dataclass
class World:
    """A model, chunks that blendserve's engine stored, and both engines over them."""

    own: Own
    chunks: list[TokenIds]
    served: Served

    def prompt(self, *parts: int | TokenIds, suffix: int = 40, seed: int = 7) -> TokenIds:
        """The context, chunks by number and other text, and a question."""
        ids = [i for part in parts for i in (self.chunks[part] if isinstance(part, int) else part)]
        return (*self.own.context, *ids, *words(suffix, seed))


@pytest.fixture(scope="module")
def make_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., World]]:
    """kind of model, settings of vLLM -> a world."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    with ExitStack() as stack:

        def make(kind: str, extra: dict[str, Any] | None = None, **options: Any) -> World:
            base = tmp_path_factory.mktemp(kind)
            own = Own(make_model(kind, base / "model"), base / "kv")
            chunks = [
                words(n, seed)
                for seed, n in enumerate([200, 180, 220, 150, 190, 210, 170, 160, 230, 205, 195, 200])
            ]
            own.store_chunks(chunks)
            return World(
                own, chunks, stack.enter_context(serving(base / "model", base / "kv", extra, **options))
            )

        yield make


@pytest.fixture(scope="module")
def world(make_world: Callable[..., World]) -> World:
    """Of the family that most tests need."""
    return make_world("llama")
