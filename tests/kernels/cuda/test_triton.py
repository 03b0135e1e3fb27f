"""How the Triton kernels are launched: tiles, splits, positions that only the device has, and the check before."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from blendserve.kernels.cases import Args
from blendserve.kernels.cuda.place import place
from blendserve.kernels.cuda.scattered import MOST_SPLITS, Tile, run
from blendserve.kernels.rotary import FORMS as ROTARY_FORMS
from blendserve.kernels.rotary import HALVES, Rotary
from blendserve.kernels.selfcheck import placing_trouble
from blendserve.kernels.types import Rope
from tests.support import kernel_formulas as formulas
from tests.support.blending import assert_near
from tests.support.kernels import Options, ways

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
        assert_near(got.double(), formulas.attend(*args)[0], 1e-5)


@pytest.mark.parametrize("form", ROTARY_FORMS)
def test_the_check_before_placement_serves(form: Rotary, monkeypatch: pytest.MonkeyPatch) -> None:
    placing_trouble.cache_clear()
    assert placing_trouble(form, torch.device("cpu"), torch.float32, 16) == ""
    placing_trouble.cache_clear()
    wrong = next(other for other in ROTARY_FORMS if other.neighbours != form.neighbours)
    plain = Rotary.rotate
    monkeypatch.setattr(Rotary, "rotate", lambda _, x, rope: plain(wrong, x, rope))
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
