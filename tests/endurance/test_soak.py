"""The soak, made short: it ends well, and each of its promises can be seen to break."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from blendserve.config import PromptConfig
from blendserve.engine.prompt import PromptBuilder
from blendserve.models.toy import toy_reader
from tests.endurance import soak
from tests.endurance.helpers import last_line


def test_a_short_soak_hits_what_a_plain_lru_of_the_same_bytes_hits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission off is checked query by query against ten lines of LRU; admission on, to be another thing."""
    monkeypatch.setattr(
        sys, "argv", ["soak", "--model", "tiny", "--queries", "40", "--block", "10", "--json"]
    )
    reader = toy_reader()
    work = soak.workload(reader, 4, 10, 0)
    monkeypatch.setattr(soak, "toy_reader", lambda: reader)
    monkeypatch.setattr(soak, "workload", lambda *_: work)
    soak.main()
    result = last_line(capsys.readouterr().out)
    on, off = result["runs"]
    prefix = len(PromptBuilder(reader.tokenizer, PromptConfig()).prefix) * reader.adapter.kv_bytes_per_token
    rates = [round(rate, 4) for rate in lru_hit_rates(work, prefix)]
    assert [block["hit_rate"] for block in off["blocks"]] == rates
    assert [run["admission"] for run in (on, off)] == ["tinylfu", "always"]
    assert sum(b["refused"] for b in on["blocks"]) > 0 == sum(b["refused"] for b in off["blocks"])
    assert sum(b["hit_rate"] for b in on["blocks"]) > sum(b["hit_rate"] for b in off["blocks"])
    for block in (*on["blocks"], *off["blocks"]):
        assert 0.8 * result["cap_bytes"] < block["bytes_most"] <= result["cap_bytes"] == work.cap_bytes
        assert block["methods"] == {"blend": 10}
        assert block["ratios"]["blend"]["n"] == 1
    assert not [promise for promise in result["broken"] if "fell" not in promise]  # blocks of ten may differ


def lru_hit_rates(work: Any, pinned: int) -> list[float]:
    """Of a cache of `work.cap_bytes` in which the prefix, `pinned` bytes, stays."""
    held: OrderedDict[int, int] = OrderedDict()
    rates = []
    for block in work.blocks:
        hits = 0
        for query in block:
            there = [chunk for chunk in query if chunk in held]
            hits += len(there)
            for chunk in there:
                held.move_to_end(chunk)
            for chunk in (chunk for chunk in query if chunk not in there):
                while pinned + sum(held.values()) + work.sizes[chunk] > work.cap_bytes:
                    held.popitem(last=False)
                held[chunk] = work.sizes[chunk]
        rates.append(hits / sum(map(len, block)))
    return rates


def a_block(**values: Any) -> Any:
    spread = soak.Spread(1.0, 1.0, 1.0, 1)
    block = soak.Block(
        warm_up=False,
        hit_rate=0.6,
        gain=2.0,
        reused=0.4,
        methods={"blend": 50},
        ttft_ms=spread,
        ratios={"blend": spread},
        after_ms=1.0,
        bytes_most=1,
        file_bytes=1,
        chunks=1,
        evictions=1,
        refused=1,
        above_cap=0,
        below_cap=0,
        wrong_books=0,
    )
    return replace(block, **values)


def a_run(blocks: Sequence[Any], admission: str = "tinylfu", damaged: int = 0) -> Any:
    return soak.Run(admission, "blend", tuple(blocks), damaged)


@pytest.mark.parametrize(
    ("run", "promise"),
    [
        (a_run([a_block(), a_block(hit_rate=0.7), a_block(hit_rate=0.66)]), "hit_rate fell by 5.7%"),
        (a_run([a_block(), a_block(gain=1.8)]), "gain fell by 10.0%"),
        (a_run([a_block(), a_block(reused=0.0)]), "1 blocks reused nothing"),
        (a_run([a_block(above_cap=2), a_block()]), "above its cap after 2"),
        (a_run([a_block(above_cap=1), a_block()], "always"), "above its cap after 1"),
        (a_run([a_block(below_cap=3), a_block()], "always"), "room to spare after 3"),
        (a_run([a_block(wrong_books=1), a_block()]), "differed after 1"),
        (a_run([a_block(), a_block()], damaged=3), "3 chunks do not verify"),
        (a_run([a_block(warm_up=True), a_block()]), "fewer than two blocks"),
    ],
)
def test_each_promise_of_the_soak_can_break(run: Any, promise: str) -> None:
    (broken,) = run.broken()
    assert promise in broken


@pytest.mark.parametrize(
    "run",
    [
        a_run([a_block(), a_block(hit_rate=0.58, gain=1.91), a_block()]),
        a_run([a_block(warm_up=True, hit_rate=0.9, below_cap=9), a_block(), a_block()]),
        a_run([a_block(), a_block(hit_rate=0.1, gain=1.0)], "always"),  # for contrast: shown, not promised
    ],
)
def test_a_good_soak_keeps_them(run: Any) -> None:
    assert run.broken() == []
