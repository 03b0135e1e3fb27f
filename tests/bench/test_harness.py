"""The harness against values known in advance: order of rounds, resuming, ratios by round, tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from blendserve.bench.harness import (
    ANY,
    Case,
    Column,
    Group,
    Sample,
    SampleLog,
    measure,
    ms,
    ratio,
    read_result,
    select,
    speedup,
    table,
)
from blendserve.errors import InputError

HEADER = {"bench": "toy", "config": {"repeats": 3}, "environment": {"machine": {"cpu": "C", "threads": 1}}}


def samples(**methods: list[float]) -> list[Sample]:
    """One sample a round of each method."""
    return [
        Sample({"method": name}, n, {"ttft_s": value})
        for name, values in methods.items()
        for n, value in enumerate(values)
    ]


def test_rounds_warm_up_first_and_each_begins_with_another_case() -> None:
    order: list[str] = []

    def run(name: str) -> dict[str, float]:
        order.append(name)
        return {"calls": len(order)}

    prepared: list[str] = []
    cases = [Case({"case": n}, partial(run, n), partial(prepared.append, n)) for n in "abc"]
    log = SampleLog(HEADER)
    measure([Group({}, cases), Group({"cold": 1}, cases[:1], repeats=1, warm_up=False)], 3, log)
    assert "".join(order) == "abc" + "abc" + "bac" + "cab" + "a"
    assert prepared == order
    calls = {n: [s[2]["calls"] for s in log.groups[0]["samples"] if s[0]["case"] == n] for n in "abc"}
    assert calls == {"a": [4, 8, 11], "b": [5, 7, 12], "c": [6, 9, 10]}
    assert log.groups[1]["samples"] == [[{"cold": 1, "case": "a"}, 0, {"calls": 13}]]


def test_columns_compare_with_a_case_of_the_same_round() -> None:
    """So a machine that slows one round changes no ratio."""
    slow_round = samples(full=[40.0, 4.0, 4.0], fast=[20.0, 2.0, 2.0])
    assert speedup("", "ttft_s", method="full").values(slow_round[::-1], {"method": "fast"}) == [2.0] * 3
    found = samples(full=[4.0, 8.0], fast=[2.0, 2.0], slow=[1.0, 16.0])
    assert speedup("", "ttft_s", method="full").values(found, {"method": "fast"}) == [2.0, 4.0]
    assert ratio("", "ttft_s", method="full").values(found, {"method": "fast"}) == [0.5, 0.25]
    assert ratio("", "ttft_s", method="full").values(found, {"method": "full"}) == []
    best = ratio("", "ttft_s", method=ANY).values(found, {"method": "full"})
    assert best == [4.0, 4.0]  # over the best of each round
    assert ms("", "ttft_s").values(found, {"method": "fast"}) == [2000.0, 2000.0]
    cold = [*found, Sample({"method": "full", "cache": "cold"}, 0, {"ttft_s": 12.0})]
    assert ratio("", "ttft_s", cache=None).values(cold, {"method": "full", "cache": "cold"}) == [3.0]


def test_a_table_names_what_rows_share_in_its_title() -> None:
    found = [
        Sample({"context": 9, **s.labels}, s.round, s.metrics) for s in samples(a=[1.0, 3.0], b=[2.0, 2.0])
    ]
    columns = (ms("TTFT ms", "ttft_s"), Column("none", "nothing"))
    assert table("T", *columns).render(found) == (
        "T, context 9",
        ["method", "TTFT ms"],
        [["a", "2,000.0 (1,000.0-3,000.0)"], ["b", "2,000.0"]],
    )
    assert table("T", *columns, method="c").render(found) is None


def test_one_row_is_selected_or_an_error() -> None:
    rows = [list(sample) for sample in samples(a=[1.0], b=[2.0])]
    result = {**HEADER, "groups": [{"group": {}, "facts": {}, "samples": rows}]}
    assert select(result, Column("", "ttft_s"), {"method": "b"}) == [2.0]
    for metric, where in (("ttft_s", {}), ("no", {"method": "a"})):
        with pytest.raises(InputError):
            select(result, Column("", metric), where)


def groups(names: str, ran: list[str]) -> Iterator[Group]:
    """The point of a name is measured by each run of it; "!" is a kill."""

    def run(name: str) -> dict[str, float]:
        ran.append(name)
        if name == "!":
            raise KeyboardInterrupt
        return {"ttft_s": 1.0}

    for name in names:
        yield Group({"point": name}, [Case({"case": "x"}, partial(run, name))], lambda: {"fact": len(ran)})


def test_a_killed_run_resumes_after_its_last_whole_group(tmp_path: Path) -> None:
    file, ran = tmp_path / "new" / "toy.jsonl", list[str]()
    log = SampleLog(HEADER, file)
    log.note(model="M")
    with pytest.raises(KeyboardInterrupt):
        measure(groups("ab!", ran), 1, log)
    assert not file.exists()
    with file.with_name("toy.jsonl.part").open("a") as out:
        out.write('{"group": {"point": "c"}, "sam')
    again = SampleLog(HEADER, file)
    measure(groups("abcd", ran), 1, again)
    assert "".join(ran) == "aabb!ccdd"  # with warm-up rounds
    assert again.result == read_result(file) == SampleLog(HEADER, file).result
    assert (again.is_complete, SampleLog(HEADER, file).is_complete) == (False, True)  # when they were opened
    assert again.result["environment"]["model"] == "M"
    assert [group["facts"] for group in again.groups] == [{"fact": n} for n in (2, 4, 7, 9)]
    with pytest.raises(InputError):
        SampleLog({**HEADER, "config": {"repeats": 4}}, file)
    file.write_text("{}\nnonsense\n")
    with pytest.raises(InputError):
        read_result(file)
