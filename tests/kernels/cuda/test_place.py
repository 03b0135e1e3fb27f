"""Rotation and placement in triton's interpreter, against each family's own function."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from blendserve.kernels.cuda.place import run
from blendserve.kernels.rotary import FORMS, HALVES, Rotary, RotaryForm
from blendserve.kernels.types import Rope
from blendserve.kernels.verify import placing_trouble
from blendserve.models.adapter import Adapter
from tests.support.models import TINY, tiny_adapter

FAMILIES = [
    "llama",
    "llama-yarn",
    "phi3-partial",
    "cohere",
    "glm",
    "glm4",
    "helium",
    "gemma3_text",
    "smollm3",
]


def placed(adapter: Adapter, l: int, slip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer l's keys after placing some chunks by the kernel, and as the model's own function does it."""
    generator = torch.Generator().manual_seed(l)
    shape, total = (adapter.n_kv_heads, 0, adapter.head_dim), 131
    starts, sizes = [0, 7, 60, 61], [7, 40, 1, 69]

    def draw(n: int) -> torch.Tensor:  # a slice of something larger, as layers of a chunk are
        return torch.randn(2, shape[0], n, shape[2], generator=generator).to(adapter.dtype)[1]

    keys, values = [draw(n) for n in sizes], [draw(n) for n in sizes]
    got, wanted = (torch.zeros(shape[0], total, shape[2], dtype=adapter.dtype) for _ in range(2))
    got_values, rope = torch.zeros_like(got), adapter.rope(torch.arange(total))[l]
    for k, start in zip(keys, starts, strict=True):
        here = slice(start, start + k.shape[1])
        wanted[:, here] = adapter.rotate(k, rope.at(here))
    form = adapter.rotary.form
    assert form is not None
    moved = [start + slip for start in starts]
    run(list(zip(moved, keys, values, strict=True)), got, got_values, rope, form)
    for v, start in zip(values, moved, strict=True):
        assert torch.equal(got_values[:, start : start + v.shape[1]], v)
    assert (got_values != 0).sum() <= sum(v.numel() for v in values)
    return got, wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_model_s_own_rotation(family: str, dtype: torch.dtype) -> None:
    """To the bit; the interpreter cuts bf16 off where it should round: there, to one step."""
    adapter = tiny_adapter(family, dtype)
    for l in (0, 2):
        got, wanted = placed(adapter, l)
        off = (got.float() - wanted.float()).abs()
        bound = 0.0 if dtype == torch.float32 else 3 * 2**-8 * 6
        assert float(off.max()) <= bound, f"{family}, layer {l}: max difference {float(off.max()):.3g}"


def test_the_check_sees_a_place_that_is_one_off() -> None:
    got, wanted = placed(tiny_adapter("llama"), 0, slip=1)
    assert not torch.equal(got, wanted)


def test_every_family_has_a_known_form() -> None:
    """So that every one of them is placed in one launch; if a new one is not, it is placed by its own function."""
    forms = {name: tiny_adapter(name).rotary.form for name in TINY}
    assert not [name for name, form in forms.items() if form is None]
    assert set(forms.values()) == set(FORMS)


def test_a_rotation_of_another_kind_is_told() -> None:
    adapter = tiny_adapter("llama")
    own, rope, x = adapter.rotary._own, adapter.rope(torch.arange(8))[0], torch.randn(2, 8, adapter.head_dim)
    assert Rotary.of(own, rope, x).form == HALVES
    assert Rotary.of(lambda q, k, cos, sin: own(q, k, cos, -sin), rope, x).form is None


@pytest.mark.parametrize("form", FORMS)
def test_the_check_before_it_serves(form: RotaryForm, monkeypatch: pytest.MonkeyPatch) -> None:
    placing_trouble.cache_clear()
    assert placing_trouble(form, torch.device("cpu"), torch.float32, 16) == ""
    placing_trouble.cache_clear()
    wrong = next(other for other in FORMS if other.neighbours != form.neighbours)
    plain = RotaryForm.rotated
    monkeypatch.setattr(RotaryForm, "rotated", lambda _, x, rope: plain(wrong, x, rope))
    assert "off by" in placing_trouble(form, torch.device("cpu"), torch.float32, 16)
    placing_trouble.cache_clear()


def test_a_chunk_that_does_not_fit_is_refused() -> None:
    cache = torch.ones(2, 4, 16)
    with pytest.raises(ValueError, match="behind the cache's 4 tokens"):
        run([(1, cache, cache)], cache, cache, Rope(cache[0], cache[0]), HALVES)


def test_nothing_to_place() -> None:
    cache = torch.ones(2, 4, 16)
    run([], cache, cache, Rope(cache[0], cache[0]), HALVES)
    run([(0, cache[:, :0], cache[:, :0])], cache, cache, Rope(cache[0], cache[0]), HALVES)
    assert bool((cache == 1).all())
