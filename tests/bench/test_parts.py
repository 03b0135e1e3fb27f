"""Figures, workloads, page cache and memory: each against something that is known beforehand."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.bench import pagecache
from blendserve.bench.figures import interleaved, ratios, spread
from blendserve.bench.workload import Text, make_workload
from blendserve.errors import InputError
from blendserve.models.loader import Reader

seconds = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9)


@given(seconds, st.randoms(use_true_random=False))
def test_a_spread_does_not_depend_on_the_order_of_rounds(values: list[float], random: object) -> None:
    one, other = spread(values), spread(sorted(values))
    assert [one[k] for k in ("median", "least", "most")] == [other[k] for k in ("median", "least", "most")]
    assert one["least"] <= one["median"] <= one["most"]


@given(seconds, st.floats(0.01, 100))
def test_a_machine_that_slows_both_sides_of_a_round_changes_no_ratio(values: list[float], by: float) -> None:
    """Ten times as slow in one round: the ratio of medians would move, the median of ratios does not."""
    base = [by * v for v in values]
    slow = [10 * base[0], *base[1:]], [10 * values[0], *values[1:]]
    assert ratios(*slow)["median"] == pytest.approx(by)


def test_a_ratio_is_the_median_of_rounds_and_not_of_sides() -> None:
    assert ratios([2.0, 40.0, 2.0], [1.0, 10.0, 4.0]) == {
        "median": 2.0,
        "least": 0.5,
        "most": 4.0,
        "rounds": [2.0, 4.0, 0.5],
    }


def test_rounds_warm_up_first_and_begin_with_another_call_each() -> None:
    order: list[str] = []
    told: list[tuple[int, int]] = []

    def call(name: str) -> int:
        order.append(name)
        return len(order)

    results = interleaved({name: partial(call, name) for name in "abc"}, 3, lambda *at: told.append(at))
    assert "".join(order) == "abc" + "abc" + "bac" + "cab"
    assert results == {"a": [4, 8, 11], "b": [5, 7, 12], "c": [6, 9, 10]}
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(("chunks", "tokens", "suffix"), [(6, 40, 30), (1, 300, 25), (9, 7, 40)])
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


def test_more_text_than_there_is_comes_from_its_beginning_again(reader: Reader) -> None:
    text = Text(0)
    assert len(text._from(0, 10**6)) > 900_000


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((6, 512, 40), "3,.* tokens, the context of reader .* has 512"),
        ((10**9, 10, 40), "ask for less"),
        ((2, 1, 40), "no text makes a chunk of 1 tokens"),
        ((2, 20, 3), "no text makes the suffix of 3 tokens"),
    ],
)
def test_what_cannot_be_laid_out_is_told_at_once(
    shape: tuple[int, int, int], message: str, reader: Reader
) -> None:
    with pytest.raises(InputError, match=message):
        make_workload(reader, *shape, seed=0)


def test_a_dropped_file_is_not_resident_and_a_read_one_is(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 22))
    if not hasattr(os, "posix_fadvise") or _kind_of(tmp_path) == "tmpfs":
        pytest.skip("nothing can be dropped here")
    assert pagecache.drop(file) == ""
    assert pagecache.resident(file) == 0.0
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # without read-ahead
        os.pread(opened.fileno(), 1 << 21, 0)
    assert pagecache.resident(file) == pytest.approx(0.5, abs=0.05)


def _kind_of(folder: Path) -> str:
    """The file system's name."""
    return subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True).stdout.strip()


def test_a_file_that_stays_in_memory_is_no_cold_one() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no tmpfs here")
    file = shm / f"blendserve-test-{os.getpid()}"
    file.write_bytes(b"x" * (1 << 20))
    try:
        assert "100% of" in pagecache.drop(file)
    finally:
        file.unlink()


METER = """
import torch
from blendserve.bench.memory import Meter

def held(mib):
    return torch.ones(mib << 20, dtype=torch.uint8)

held(64)
meter = Meter(torch.device("cpu"))
kept = held(16)
held(40)
held(40)
print(meter.trouble or meter.peak() / 2**20, int(kept[-1]))
"""


def test_the_meter_tells_the_most_that_was_held_at_once() -> None:
    """64 MiB that were let go before are of no account, nor is it that 40 were held twice, one after the other.

    More than 32 MiB always come from the system and go back to it; less may stay in the allocator. In a process of its
    own, where no other thread holds anything.
    """
    done = subprocess.run([sys.executable, "-c", METER], capture_output=True, text=True, check=True)
    try:
        peak = float(done.stdout.split()[0])
    except ValueError:
        pytest.skip(done.stdout)
    assert peak == pytest.approx(16 + 40, abs=3)
