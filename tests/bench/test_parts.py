"""Figures, workloads, traces, page cache and memory: each against a value that is known in advance."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.bench import hostile, pagecache, sharing
from blendserve.bench.config import SharingConfig
from blendserve.bench.decode import prefilled, run_generate, run_ours
from blendserve.bench.figures import interleaved, ratios, spread
from blendserve.bench.harness import Harness, scratch
from blendserve.bench.hostile import WITH, WITHOUT, Window
from blendserve.bench.hostile_client import Got
from blendserve.bench.serving_load import Sent
from blendserve.bench.traces import GBIT, changing, constant
from blendserve.bench.workload import make_workload
from blendserve.errors import InputError, StoreError
from blendserve.evaluate.variants import variants
from blendserve.models.loader import Reader

seconds = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9)


@given(seconds, st.floats(0.01, 100))
def test_a_machine_that_slows_one_round_changes_no_ratio(values: list[float], by: float) -> None:
    """The ratio of medians would change; the median of ratios does not."""
    base = [by * v for v in values]
    slow = [10 * base[0], *base[1:]], [10 * values[0], *values[1:]]
    assert ratios(*slow)["median"] == pytest.approx(by)
    one, other = spread(values), spread(sorted(values))
    assert [one[k] for k in ("median", "least", "most")] == [other[k] for k in ("median", "least", "most")]


def test_a_ratio_is_the_median_of_rounds() -> None:
    expected = {"median": 2.0, "least": 0.5, "most": 4.0, "rounds": [2.0, 4.0, 0.5]}
    assert ratios([2.0, 40.0, 2.0], [1.0, 10.0, 4.0]) == expected


def test_rounds_warm_up_first_and_each_begins_with_another_call() -> None:
    order: list[str] = []
    told: list[tuple[int, int]] = []

    def call(name: str) -> int:
        order.append(name)
        return len(order)

    results = interleaved({name: partial(call, name) for name in "abc"}, 3, lambda *at: told.append(at))
    assert "".join(order) == "abc" + "abc" + "bac" + "cab"
    assert results == {"a": [4, 8, 11], "b": [5, 7, 12], "c": [6, 9, 10]}
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def window(*ttft: float | None, got: dict[str, Got] | None = None) -> Window:
    return Window([Sent(seconds) for seconds in ttft], 10.0, 0.5, 2.0, got)


def test_hostile_takes_its_ratio_by_round_and_counts_who_is_not_answered() -> None:
    got = [{"deep": Got({"400": n}, [0.1 * n])} for n in (1, 3)]
    calm = [window(1.0), window(2.0)]
    found = hostile.summary({WITHOUT: calm, WITH: [window(1.5, got=got[0]), window(2.0, got=got[1])]})
    assert (found["p95_ttft_ratio"]["rounds"], found["passed"]) == ([1.5, 1.0], True)
    assert found["hostile"]["deep"] == {"statuses": {"400": 4}, "median": 0.2, "worst": pytest.approx(0.3)}
    slow = hostile.summary({WITHOUT: calm, WITH: [window(1.6), window(3.2)]})
    assert (slow["p95_ttft_ratio"]["median"], slow["passed"]) == (1.6, False)
    for attacked in ((1.0, None), (None, None)):
        found = hostile.summary({WITHOUT: [window(1.0, 1.0)], WITH: [window(*attacked)]})
        assert (found["windows"][WITH]["failed"], found["passed"]) == (attacked.count(None), False)
    for clients, share in ((1, 0.5), (3, 0.3)):
        think = hostile.thinking(0.4, clients, share)
        assert clients * 0.4 / (0.4 + think) == pytest.approx(share)


@pytest.mark.parametrize(("chunks", "tokens", "suffix"), [(1, 300, 25), (9, 7, 40)])
def test_a_workload_has_exactly_the_tokens_asked_for(
    chunks: int, tokens: int, suffix: int, reader: Reader
) -> None:
    workload = make_workload(reader, chunks, tokens, suffix, seed=3)
    prompt = workload.draw()
    assert [len(chunk) for chunk in prompt.chunks] == [tokens] * chunks
    assert len(prompt.suffix) == suffix
    assert len({chunk.ids for chunk in prompt.chunks}) == chunks
    assert make_workload(reader, chunks, tokens, suffix, seed=3).prompt == prompt
    assert make_workload(reader, chunks, tokens, suffix, seed=4).prompt != prompt
    for impossible in ((6, 512, 40), (10**9, 10, 40), (2, 1, 40), (2, 20, 3)):
        with pytest.raises(InputError):
            make_workload(reader, *impossible, seed=0)


def test_missing_kv_is_an_error_and_not_a_slow_method(reader: Reader) -> None:
    (variant,) = [v for v in variants(("query@0.2",), ()) if v.kind == "blend"]
    workload = make_workload(reader, 2, 20, 25, seed=0)
    with scratch(None) as folder, Harness(reader, workload, (variant,), folder) as contest:
        contest.precompute()
        contest.run(variant)
        contest.store.delete(next(iter(contest.store.keys())))
        with pytest.raises(StoreError):
            contest.run(variant)


def test_decode_is_timed_from_the_first_token_to_the_last(reader: Reader) -> None:
    ids = tuple(range(3, 50))
    theirs = run_generate(reader.adapter, ids, 5)
    ours = [run_ours(reader.adapter, prefilled(reader.adapter, ids, 5), len(ids), 5) for _ in range(2)]
    assert theirs.tokens == ours[0].tokens == ours[1].tokens
    for run in (theirs, *ours):
        assert len(run.tokens) == len(run.seconds) == 5
        assert run.per_token == pytest.approx((run.seconds[-1] - run.seconds[0]) / 4)


def test_users_ask_for_passages_of_one_popularity_and_their_figures_add_up() -> None:
    config = SharingConfig(users=30, questions=30, passages=4, pool=20, overlap=1.0)
    asked = sharing.trace(config)
    assert asked == sharing.trace(config) != sharing.trace(config.model_copy(update={"seed": 1}))
    assert all(len(set(question)) == 4 for user in asked for question in user)
    often = Counter(passage for user in asked for question in user for passage in question)
    assert often[0] > often[3] > often[19]
    requests = [{"ttft": ttft, "hit": hit, "asked": 4} for ttft, hit in ((1.0, 0), (3.0, 2), (2.0, 4))]
    one = {"requests": requests[:2], "computed": [7, 8], "bytes": {"all": 10}}
    other = {"requests": requests[2:], "computed": [8, 9, 8], "bytes": {"all": 12}}
    figures = sharing.summary([one, other])
    assert (figures["hit_rate"], figures["ttft_mean"], figures["ttft_p95"]) == (0.5, 2.0, 3.0)
    assert (figures["bytes"], figures["computed"], figures["computed_again"]) == (12, 5, 2)


def test_a_trace_is_its_steps_and_follows_from_the_seed() -> None:
    down = changing(0)["down"]
    assert [down.rate(at) / GBIT for at in (0.0, 0.049, 0.051, 1e9)] == [3, 3, 0.1, 0.1]
    assert constant(0.5).rate(7.0) == 0.5 * GBIT
    assert changing(1) == changing(1) != changing(2)
    assert [trace.changes for trace in (constant(0.5), *changing(1).values())] == [False, *[True] * 5]


def test_a_dropped_file_is_not_resident_and_a_read_page_is(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 22))
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip()
    if not hasattr(os, "posix_fadvise") or kind == "tmpfs":
        assert pagecache.drop(file)  # why there is no cold figure
        return
    assert pagecache.drop(file) == ""
    assert pagecache.resident(file) == 0.0
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        os.pread(opened.fileno(), 1 << 21, 0)
    assert pagecache.resident(file) == pytest.approx(0.5, abs=0.05)


METER = """
import torch
from blendserve.bench.memory import Meter
held = lambda mib: torch.ones(mib << 20, dtype=torch.uint8)
held(64)
meter = Meter(torch.device("cpu"))
kept = held(16)
held(40)
held(40)
print(meter.trouble or meter.peak() / 2**20, int(kept[-1]))
"""


def test_the_meter_gives_the_most_that_was_held_at_once() -> None:
    """In a fresh process; above 32 MiB, memory always comes from the system and goes back to it."""
    done = subprocess.run([sys.executable, "-c", METER], capture_output=True, text=True, check=True)
    try:
        peak = float(done.stdout.split()[0])
    except ValueError:
        pytest.skip(done.stdout)
    assert peak == pytest.approx(16 + 40, abs=3)
