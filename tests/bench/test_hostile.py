"""The bench with a hostile client, against a toy server: it counts rightly, and it can fail."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blendserve.bench import hostile as bench
from blendserve.bench.hostile import WITH, WITHOUT, Window
from blendserve.bench.hostile_client import GIVEN_UP, KINDS, Got, chosen
from blendserve.bench.serving_load import Sent
from blendserve.cli import main
from blendserve.errors import ConfigError, ServeError
from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES
from tests.serve.helpers import Server, bearer

MOST = ServeConfig().max_body_kb * 1024
SMALL = ("--clients", "2", "--passages", "2", "--new-tokens", "2", "--seconds", "0.2", "--rounds", "2")
REFUSED = {
    "question": 400,
    "largest": 400,
    "larger": 413,
    "messages": 400,
    "passages": 400,
    "stops": 400,
    "deep": 400,
}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy server in the place of a real one: in this process, with two collections of its own."""

    @contextmanager
    def server(folder: Path) -> Iterator[str]:
        made = Server(folder / "served", ServeConfig(keys=folder / "keys.json"))
        try:
            yield made.url
        finally:
            made.close()

    def prepare(index: Path, folder: Path, say: bench.Say) -> None:
        folder.mkdir()
        lines = (json.dumps({"text": p.text, "title": p.title}) + "\n" for p in PASSAGES)
        (folder / "passages.jsonl").write_text("".join(lines))

    for name, value in {"server": server, "prepare": prepare, "INDEX": "a", "UPLOADS": "b"}.items():
        monkeypatch.setattr(bench, name, value)


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(["bench", "hostile", *SMALL, *options])
    return int(end.value.code or 0), capsys.readouterr().out


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(("target", "code"), [(math.inf, 0), (0.0, 1)])
def test_the_exit_code_says_whether_the_target_is_met(
    target: float,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "argv", ["blendserve"])
    monkeypatch.setattr(bench, "TARGET", target)
    got, out = run(capsys, "--folder", str(tmp_path), "--kinds", ",".join(REFUSED))
    assert got == code
    assert "measured on" in out
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert found["passed"] is not bool(code)
    assert found["think_seconds"] > 0
    for kind in (WITH, WITHOUT):
        window = found["windows"][kind]
        assert window["failed"] == 0
        assert window["answered"] == sum(map(len, window["rounds"])) >= 2 * 2  # each client, each round
        assert window["ttft"]["p50"] <= window["ttft"]["p95"] <= window["ttft"]["worst"]
    assert len(found["p95_ttft_ratio"]["rounds"]) == 2
    assert list(found["hostile"]) == list(REFUSED)
    for kind, status in REFUSED.items():
        assert found["hostile"][kind]["statuses"].keys() <= {str(status), "429", GIVEN_UP}
    assert list(tmp_path.iterdir()) == []


def test_what_is_hostile_is_refused_and_a_long_document_is_work(tmp_path: Path) -> None:
    keys = bench.make_keys(tmp_path / "keys.json", 1)
    file = tmp_path / "keys.json"
    file.write_text(file.read_text().replace(bench.INDEX, "a").replace(bench.UPLOADS, "b"))
    server = Server(tmp_path, ServeConfig(keys=file))
    try:
        model = server.get("/v1/models", keys.clients[0]).json()["data"][0]["id"]
        asked = {kind: make(model, MOST) for kind, make in KINDS.items()}
        headers = {**bearer(keys.hostile), "Content-Type": "application/json"}
        statuses = {
            kind: server.http.post(path, content=body, headers=headers).status_code
            for kind, (path, body) in asked.items()
        }
    finally:
        server.close()
    assert statuses == {**REFUSED, "document": 202}
    assert (len(asked["largest"][1]), len(asked["larger"][1])) == (MOST, MOST + 1)
    assert len(asked["document"][1]) == MOST
    assert 0.9 * MOST < len(asked["passages"][1]) <= MOST


def window(*ttft: float | None, hostile: dict[str, Got] | None = None) -> Window:
    return Window([Sent(seconds) for seconds in ttft], 10.0, 0.5, 2.0, hostile)


def test_the_ratio_is_taken_round_by_round() -> None:
    got = [{"deep": Got({"400": n}, [0.1 * n])} for n in (1, 3)]
    calm = [window(1.0), window(2.0)]
    found = bench.summary({WITHOUT: calm, WITH: [window(1.5, hostile=got[0]), window(2.0, hostile=got[1])]})
    assert found["p95_ttft_ratio"]["rounds"] == [1.5, 1.0]
    assert found["passed"]
    assert found["hostile"]["deep"]["statuses"] == {"400": 4}
    assert found["hostile"]["deep"]["worst"] == pytest.approx(0.3)
    slow = bench.summary({WITHOUT: calm, WITH: [window(1.6), window(3.2)]})
    assert (slow["p95_ttft_ratio"]["median"], slow["passed"]) == (1.6, False)


@pytest.mark.parametrize("attacked", [(1.0, None), (None, None)])
def test_who_is_not_answered_counts(attacked: tuple[float | None, ...]) -> None:
    found = bench.summary({WITHOUT: [window(1.0, 1.0)], WITH: [window(*attacked)]})
    assert found["windows"][WITH]["failed"] == attacked.count(None)
    assert (found["p95_ttft_ratio"] is None) == (attacked[0] is None)
    assert not found["passed"]


def test_clients_think_as_long_as_leaves_the_server_its_rest() -> None:
    for clients, share in ((1, 0.5), (3, 0.3)):
        think = bench.thinking(0.4, clients, share)
        assert clients * 0.4 / (0.4 + think) == pytest.approx(share)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert chosen(()) == tuple(KINDS)
    assert chosen(("deep", "deep")) == ("deep",)
    with pytest.raises(ConfigError, match=r"'depp'.* deep"):
        chosen(("depp",))
    bench.make_keys(tmp_path / "keys.json", 1)
    (tmp_path / "made").mkdir()
    with pytest.raises(ServeError, match=r"did not start: error: .*index"), bench.server(tmp_path):
        pass
