"""How the Triton kernels are launched: tiles, splits, positions that only the device has, and the check before."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from blendserve.kernels.cuda.place import run as place
from blendserve.kernels.cuda.scattered import FEW, FORMS, MOST_SPLITS, Tile, run, splits_for, tile_for
from blendserve.kernels.rotary import FORMS as ROTARY_FORMS
from blendserve.kernels.rotary import HALVES, RotaryForm
from blendserve.kernels.types import Rope
from blendserve.kernels.verify import KEYS, Kind, attention_trouble, placing_trouble
from tests.support.blending import assert_near
from tests.support.kernels import Args, Options, attend_formula, off_gpu, ways

SMALL = Tile(16, 16, 4, 1)
TRITON = next(way for way in ways() if way.name == "triton")


def case(**options: object) -> Args:
    made: Options = {"group": 4, "dim": 32, **options}
    return TRITON.args(torch.float32, made)


@pytest.mark.parametrize("splits", [1, 2, 7, MOST_SPLITS])
def test_keys_are_split_among_programs(splits: int) -> None:
    """Some get none; a wider tile goes as far."""
    q, keys, values, spec, plan = args = case(at=[0, 1, 3, 25, 40, 129], window=30)
    for tile in (SMALL, Tile(32, 32, 4, 1)):
        got = run(q, keys, values, spec, plan.positions, tile, splits)
        assert_near(got.double(), attend_formula(*args)[0], 1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_positions_that_only_the_device_has(window: int | None) -> None:
    """As in a captured graph: what the launch depends on is then the cache's room."""
    for at in ([599], list(range(3, 600, 10))):
        args = case(at=at, window=window, known=False)
        assert_near(TRITON.run(args)[0].double(), attend_formula(*args)[0], 1e-5)


def test_no_rows() -> None:
    q, keys, values, spec, _ = case(at=[5])
    assert run(q[:, :0], keys, values, spec, torch.empty(0, dtype=torch.long), SMALL, 1).shape == (0, 256)


def test_few_programs_are_split_and_many_are_not() -> None:
    tile = Tile(128, 64, 8, 3)
    assert splits_for(132, 32_768, tile, 132) == 1
    assert splits_for(8, 32_768, tile, 132) == 16
    assert splits_for(8, 3112, tile, 132) == 12  # no split of less than four blocks
    assert splits_for(1, 131_072, tile, 132) == MOST_SPLITS
    assert splits_for(8, 100, tile, 132) == 1


def test_the_table_of_tiles() -> None:
    bf16 = torch.bfloat16
    assert tile_for(bf16, 128, FEW).queries == FEW < tile_for(bf16, 128, FEW + 1).queries
    assert tile_for(bf16, 128, 2000, roomy=False).stages < tile_for(bf16, 128, 2000).stages
    for dtype in (bf16, torch.float32):
        for dim in (16, 64, 96, 128, 256):
            for queries in (1, 2000):
                tile = tile_for(dtype, dim, queries)
                assert all(size >= 16 and size & (size - 1) == 0 for size in (tile.queries, tile.keys))


def test_the_check_before_attention_serves() -> None:
    """Every form of it; over fewer rows than on a GPU, where all of this needs no time."""
    kind = Kind(torch.device("cpu"), torch.float32, 2, 16, True, True)
    with off_gpu(TRITON):
        assert attention_trouble(FORMS, kind, ((0,), (KEYS - 1,), tuple(range(1, KEYS, 90)))) == ""


@pytest.mark.parametrize("form", ROTARY_FORMS)
def test_the_check_before_placement_serves(form: RotaryForm, monkeypatch: pytest.MonkeyPatch) -> None:
    placing_trouble.cache_clear()
    assert placing_trouble(form, torch.device("cpu"), torch.float32, 16) == ""
    placing_trouble.cache_clear()
    wrong = next(other for other in ROTARY_FORMS if other.neighbours != form.neighbours)
    plain = RotaryForm.rotated
    monkeypatch.setattr(RotaryForm, "rotated", lambda _, x, rope: plain(wrong, x, rope))
    assert placing_trouble(form, torch.device("cpu"), torch.float32, 16)
    placing_trouble.cache_clear()


def test_a_chunk_that_does_not_fit_is_refused_and_nothing_is_no_chunk() -> None:
    cache = torch.ones(2, 4, 16)
    rope = Rope(cache[0], cache[0])
    with pytest.raises(ValueError):  # noqa: PT011
        place([(1, cache, cache)], cache, cache, rope, HALVES)
    for chunks in ([], [(0, cache[:, :0], cache[:, :0])]):
        place(chunks, cache, cache, rope, HALVES)
    assert bool((cache == 1).all())
