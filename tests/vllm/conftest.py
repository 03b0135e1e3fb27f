"""These tests need vLLM, which has an environment of its own: `make test-vllm`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.vllm import World, world_of


@pytest.fixture(scope="module", params=["llama"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Of the family that most tests need; a module may ask for others."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    kind, options = request.param if isinstance(request.param, tuple) else (request.param, {})
    with world_of(kind, tmp_path_factory.mktemp(kind), **options) as made:
        yield made
