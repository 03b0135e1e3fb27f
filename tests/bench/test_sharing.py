"""The sharing bench: what users ask for, what is counted of it, and a run of it in this process."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blendserve.bench import sharing
from blendserve.bench.config import SharingConfig
from blendserve.bench.machine import where
from blendserve.bench.sharing_node import Node
from blendserve.cli import main


def test_users_ask_for_different_passages_of_one_law() -> None:
    config = SharingConfig(users=30, questions=30, passages=4, pool=20, overlap=1.0)
    asked = sharing.trace(config)
    assert asked == sharing.trace(config)
    assert asked != sharing.trace(config.model_copy(update={"seed": 1}))
    assert all(len(set(question)) == 4 for user in asked for question in user)
    often = Counter(passage for user in asked for question in user for passage in question)
    assert often[0] > often[3] > often[19]
    alone = sharing.trace(config.model_copy(update={"overlap": 0.0}))
    favourites = {Counter(p for q in user for p in q).most_common(1)[0][0] for user in alone}
    assert len(favourites) > 8


def test_what_several_processes_tell_is_added_up() -> None:
    def request(ttft: float, hit: int) -> dict[str, Any]:
        return {"ttft": ttft, "hit": hit, "asked": 4}

    parts = [
        {"requests": [request(1.0, 0), request(3.0, 2)], "computed": [7, 8], "bytes": {"all": 10}},
        {"requests": [request(2.0, 4)], "computed": [8, 9, 8], "bytes": {"all": 12}},
    ]
    figures = sharing.summary(parts)
    assert (figures["hit_rate"], figures["ttft_mean"], figures["ttft_p95"]) == (0.5, 2.0, 3.0)
    assert (figures["bytes"], figures["computed"], figures["computed_again"]) == (12, 5, 2)


def test_one_cache_for_all_hits_more_often(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine's files, the node in this process."""

    class Here:
        def __init__(self, node: Node) -> None:
            self.take, self.about = node.run, where(node.config, node.reader)

    @contextmanager
    def here(config: SharingConfig, folder: Path, url: str, number: int) -> Iterator[Here]:
        yield Here(Node(config, number, folder, url))

    monkeypatch.setattr(sharing, "_node", here)
    words = [
        "--users",
        "2",
        "--engines",
        "1",
        "--questions",
        "6",
        "--passages",
        "2",
        "--pool",
        "6",
        "--store",
        "lmdb",
    ]
    words += [
        "--chunk-tokens",
        "40",
        "--memory",
        "1",
        "--model",
        tiny,
        "--dtype",
        "float32",
        "--overlap",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["blendserve"])
    with pytest.raises(SystemExit) as end:
        main(["bench", "sharing", *words, "--plot", str(tmp_path / "it.svg"), "--folder", str(tmp_path)])
    out = capsys.readouterr().out
    assert not end.value.code
    figures = json.loads(out.strip().splitlines()[-1])
    own, shared = (figures["arrangements"][name] for name in (sharing.PER_USER, sharing.SHARED))
    assert own["requests"] == shared["requests"] == 12
    assert shared["hit_rate"] > own["hit_rate"]
    assert shared["computed"] < own["computed"]
    assert shared["bytes"] > 0
    assert "one cache for all" in out
    assert (tmp_path / "it.svg").read_text().startswith("<?xml")
