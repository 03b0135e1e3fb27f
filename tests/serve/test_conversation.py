"""Ten turns: every answer is what the model itself would say to all of it, and earlier turns are found, not computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.serve.helpers import Server
from tests.support.engines import passages_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("talk"), ServeConfig())
    yield made
    made.close()


def test_ten_turns_over_http_are_full_prefill(server: Server) -> None:
    """With everything recomputed, blending is exact: then every turn must say what full prefill says."""
    server.engine.precompute(PASSAGES)
    messages: list[dict[str, str]] = []
    for turn in range(10):
        messages.append({"role": "user", "content": f"{QUESTIONS[turn % 4]} ({turn})"})
        extras = {"passages": [{"text": p.text, "title": p.title} for p in passages_of(turn)], "ratio": 1.0}
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "x_blendserve": extras}
        said = server.post("/v1/chat/completions", body).json()
        full = server.post(
            "/v1/chat/completions", {**body, "x_blendserve": {**extras, "method": "full"}}
        ).json()
        text = said["choices"][0]["message"]["content"]
        assert text == full["choices"][0]["message"]["content"]
        assert said["usage"]["prompt_tokens"] == full["usage"]["prompt_tokens"]
        assert full["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] > 25 * (turn - 1)
        messages.append({"role": "assistant", "content": text})
