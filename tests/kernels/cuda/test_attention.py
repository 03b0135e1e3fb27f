"""The Triton kernel in triton's interpreter, against the formula over a dense mask in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")


from blendserve.kernels.cuda import scattered
from blendserve.kernels.cuda.scattered import FEW, MOST_SPLITS, Tile, run, splits_for, tile_for
from blendserve.kernels.rows import RowPlan
from blendserve.kernels.verify import KEYS, Kind, attention_trouble
from tests.kernels.cuda.helpers import Case, bf16_products, make_case, rows_of
from tests.support.blending import assert_near

SMALL, WIDE = Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)


def attended(case: Case, tile: Tile = SMALL, splits: int = 1) -> torch.Tensor:
    return run(case.q, case.keys, case.values, case.spec, case.at, tile, splits)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    total = draw(st.sampled_from([1, 2, 15, 16, 17, 60, 130]))
    return {
        "at": rows_of(total, draw(st.sampled_from([0.05, 0.3, 1.0])), draw(st.integers(0, 99))),
        "n_kv": draw(st.integers(1, 2)),
        "group": draw(st.integers(1, 5)),
        "dim": draw(st.sampled_from([2, 16, 24, 64])),
        "window": draw(st.none() | st.integers(1, total + 5)),
        "softcap": draw(st.sampled_from([None, 0.7])),
    }


@settings(max_examples=25)
@given(cases(), st.sampled_from([SMALL, WIDE]), st.sampled_from([1, 2, 5]))
def test_equals_the_formula(options: dict[str, Any], tile: Tile, splits: int) -> None:
    case = make_case(**options)
    assert_near(attended(case, tile, splits), case.wanted, 1e-5)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_every_head_size(dim: int) -> None:
    case = make_case(torch.tensor([0, 3, 4, 31, 40]), n_kv=1, group=3, dim=dim)
    assert_near(attended(case), case.wanted, 1e-5)


def test_the_tiles_of_the_table() -> None:
    """As they run on a GPU: the tail of a prompt in the large one, one row in the small one."""
    for at in (torch.arange(190, 260), torch.tensor([259])):
        case = make_case(at, n_kv=1, group=4, dim=32, dtype=torch.float16)
        assert_near(attended(case, tile_for(torch.float16, 32, 4 * len(at)), 2), case.wanted, 0.01)


def test_bf16() -> None:
    case = make_case(rows_of(90, 0.4, 1), group=3, dim=32, window=40, softcap=2.0, dtype=torch.bfloat16)
    with bf16_products():
        assert_near(attended(case, splits=2), case.wanted, 0.05)


@pytest.mark.parametrize("slip", [-1, 1])
def test_the_check_sees_rows_that_are_one_position_off(slip: int) -> None:
    case = make_case(torch.tensor([3, 4, 9, 20, 21]), behind=0.5)
    moved = Case(case.q, case.keys, case.values, case.at + slip, case.spec, case.wanted)
    with pytest.raises(AssertionError, match="max difference"):
        assert_near(attended(moved), case.wanted, 1e-5)


def test_a_split_without_keys_changes_nothing() -> None:
    case = make_case(torch.tensor([0, 1, 40]))
    assert_near(attended(case, splits=MOST_SPLITS), case.wanted, 1e-5)


def test_no_rows() -> None:
    case = make_case(torch.tensor([5]))
    none = torch.empty(0, dtype=torch.long)
    assert run(case.q[:, :0], case.keys, case.values, case.spec, none, SMALL, 1).shape == (0, 64)


def test_positions_that_nobody_knows_here() -> None:
    """As in a captured graph: what the launch depends on is then the cache's room, and the numbers are the same."""
    case = make_case(torch.tensor([25]), group=4)
    assert_near(attended(case, splits=7), attended(case, splits=1), 1e-6)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would say of itself."""
    monkeypatch.setattr(scattered, "capability", lambda device: (9, 0))
    monkeypatch.setattr(scattered, "processors", lambda device: 6)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("window", "known"), [(None, True), (None, False), (50, True)])
def test_as_a_request_calls_it(window: int | None, known: bool) -> None:
    """Tiles and splits chosen from the shapes; with positions that only the device has, too."""
    for at in (torch.tensor([599]), rows_of(600, 0.1, 3)):
        case = make_case(at, group=3, dim=32, window=window, dtype=torch.float16)
        plan = case.plan if known else RowPlan(at, 3, window, None)
        got = scattered.attend(case.q, case.keys, case.values, case.spec, plan)
        assert_near(got, case.wanted, 0.01)


@pytest.mark.usefixtures("hopper")
def test_the_check_before_it_serves() -> None:
    """Every form of it; over fewer rows than on a GPU, where all of this takes no time."""
    kind = Kind(torch.device("cpu"), torch.float32, 1, 16, True, True)
    assert attention_trouble(scattered.FORMS, kind, ((0,), (KEYS - 1,), tuple(range(1, KEYS, 90)))) == ""


def test_few_programs_are_split_and_many_are_not() -> None:
    tile = Tile(128, 64, 8, 3)
    assert splits_for(132, 32_768, tile, 132) == 1
    assert splits_for(8, 32_768, tile, 132) == 16
    assert splits_for(8, 3112, tile, 132) == 12  # no split of less than four blocks
    assert splits_for(1, 131_072, tile, 132) == MOST_SPLITS
    assert splits_for(8, 100, tile, 132) == 1


def test_the_table_of_tiles() -> None:
    assert tile_for(torch.bfloat16, 128, FEW).queries == FEW < tile_for(torch.bfloat16, 128, FEW + 1).queries
    assert (
        tile_for(torch.bfloat16, 128, 2000, roomy=False).stages < tile_for(torch.bfloat16, 128, 2000).stages
    )
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (16, 64, 96, 128, 256):
            for queries in (1, 2000):
                tile = tile_for(dtype, dim, queries)
                assert all(size >= 16 and size & (size - 1) == 0 for size in (tile.queries, tile.keys))


def test_what_it_takes() -> None:
    case = make_case(torch.tensor([5, 6]))
    q, keys, values = case.q, case.keys, case.values
    assert scattered.fits(q, keys, values)
    assert not scattered.fits_gpu(q, keys, values, case.spec, case.plan), "no GPU here"
    assert not scattered.fits(q.half(), keys, values)
    assert not scattered.fits(q, keys[..., ::2], values)
    assert not scattered.fits(q.double(), keys.double(), values.double())
    assert not scattered.fits(*(x.new_zeros(2, 2, 512) for x in (q, keys, values)))
