"""A target of quality over HTTP: what answers, headers and metrics say, and what is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blendserve.blend.policies import START_RATIO
from blendserve.quality.control import QualityControl
from blendserve.quality.target import RATIOS, Loss
from tests.support.engines import QUESTIONS
from tests.support.http import OWN, Client, Server, serving
from tests.support.waiting import eventually

HEADER = "x-blendserve-quality"


def calibrate(server: Server, monkeypatch: pytest.MonkeyPatch, agreement: float) -> None:
    """As if every prompt of collection a had lost that much at every ratio."""
    monkeypatch.setattr(QualityControl, "losses", lambda *_: [Loss(agreement, 0.01)] * len(RATIOS))
    server.engine.calibrate(140, [f"Question {n}?" for n in range(140)])


def asked(server: Client, **fields: Any) -> Any:
    response = server.post(
        "/v1/rag/query", {"question": QUESTIONS[0], "collections": ["a"], "top_k": 3, **fields}
    )
    assert response.status_code == 200, response.text
    return response


def test_a_promise_is_reported_checked_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, engine={"quality": {"min_agreement": 0.6, "check_share": 1.0}}) as server:
        server.warm(OWN)
        assert asked(server).json()["report"]["quality"]["ratio"] == START_RATIO
        eventually(lambda: not server.backend.scheduler.has_work)
        calibrate(server, monkeypatch, 0.99)
        first = asked(server)
        assert first.json()["report"]["quality"]["ratio"] == 0.0
        assert first.headers[HEADER] == first.json()["report"]["quality"]["summary"]
        eventually(lambda: server.sample("quality_checked_at", collection="a") > 1.7e9)
        eventually(lambda: not server.backend.scheduler.has_work)
        checks = server.sample("quality_checks_total", result="done")
        assert server.sample("quality_limit", collection="a") == pytest.approx(0.4)
        assert server.sample("quality_ratio", collection="a") == 0.0
        assert server.sample("quality_kl_count") == checks
        assert server.sample("quality_check_seconds_total") > 0
        report = asked(server).json()["report"]["quality"]
        assert report["interval"][0] <= report["agreement"] <= report["interval"][1]
        assert report["agreement"] == pytest.approx(
            1 - server.sample("quality_loss", collection="a"), abs=0.1
        )
        assert asked(server, collections=["a", "b"]).json()["report"]["quality"]["ratio"] == START_RATIO
        chosen = asked(server, ratio=0.3)
        assert (chosen.json()["report"]["ratio"], chosen.json()["report"]["quality"]) == (0.3, None)
        assert asked(server, method="auto").json()["report"]["quality"]["ratio"] == 0.0


def test_an_answer_is_compared_with_full_prefill_on_request(client: Client) -> None:
    client.warm(OWN)
    for fields in ({"method": "full"}, {"method": "reuse"}, {"method": "blend", "ratio": 0.5}):
        answer = client.ask(passages=OWN, check=True, **fields)
        check = answer["check"]
        shown = "".join(text for text, _ in check["tokens"])
        assert shown.startswith(answer["text"])
        agreed = [full is None for _, full in check["tokens"]]
        assert check["agreement"] == pytest.approx(sum(agreed) / len(agreed))
        same = client.ask(passages=OWN, method="full")["text"] == answer["text"]
        assert same == all(agreed)
        assert (check["kl"] < 1e-6) == (fields["method"] == "full")
        events = client.events(
            "/v1/rag/query", {"question": QUESTIONS[0], "passages": OWN, "check": True, **fields}
        )
        assert events[-1] == {"event": "check", "check": check}
    assert "check" not in client.ask(passages=OWN)


def test_without_a_target_nothing_is_said_of_one(tmp_path: Path) -> None:
    with serving(tmp_path, engine={"quality": {"min_agreement": None}}) as server:
        response = asked(server)
        assert HEADER not in response.headers
        assert response.json()["report"]["quality"] is None
