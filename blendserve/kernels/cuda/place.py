"""A layer of stored KV put into the cache of a GPU in one launch: keys rotated on their way, values as they are.

Written out in torch that is a dozen launches a chunk and layer, hundreds a layer for a long prompt. The rotation gives
what the model's own function gives, to the bit in 16 bits: `form_of` finds out which of the forms below a model's is, by
running it; a model whose form is not among them is placed by its own function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blendserve.gpu.available import has_triton
from blendserve.models.adapter import Adapter, Rope

BLOCK = 32  # tokens of one program


@dataclass(frozen=True, slots=True)
class Form:
    """How a family turns a head: pairs (x, y) become (x cos - y sin, y cos + x sin)."""

    neighbours: bool  # pairs are dims (2i, 2i + 1), else (i, i + R / 2)
    step: int  # columns of cos from one pair's to the next's
    wide: bool  # computed in fp32 and rounded once, else after every step


HALVES = Form(neighbours=False, step=1, wide=False)  # Llama and most others
FORMS = (
    HALVES,
    Form(neighbours=True, step=2, wide=True),  # Command R
    Form(neighbours=True, step=1, wide=False),  # GLM-4, Helium
)

_forms: WeakKeyDictionary[Adapter, Form | None] = WeakKeyDictionary()


def form_of(adapter: Adapter) -> Form | None:
    """The form that this reader's own function has, found by running it; None = another one."""
    if adapter not in _forms:
        _forms[adapter] = _found(adapter)
    return _forms[adapter]


@torch.inference_mode()
def _found(adapter: Adapter) -> Form | None:
    positions = torch.arange(8, device=adapter.device) * 37 + 1
    rope = next((rope for rope in adapter.rope(positions) if rope.cos.shape[-1]), None)
    if rope is None:
        return HALVES  # no layer turns anything
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, len(positions), adapter.head_dim, generator=generator)
    x = x.to(adapter.device, adapter.dtype)
    wanted = adapter.rotate(x, rope)
    return next((form for form in FORMS if torch.equal(turned(form, x, rope), wanted)), None)


def turned(form: Form, x: Tensor, rope: Rope) -> Tensor:
    """Keys x [K, S, D] turned as the kernel does it, in torch."""
    width = rope.cos.shape[-1]
    half, out = width // 2, x.clone()
    pairs = (slice(0, width, 2), slice(1, width, 2)) if form.neighbours else (slice(half), slice(half, width))
    columns = slice(0, half * form.step, form.step)
    one, other, cos, sin = x[..., pairs[0]], x[..., pairs[1]], rope.cos[:, columns], rope.sin[:, columns]
    if form.wide:
        one, other = one.float(), other.float()
    out[..., pairs[0]] = (one * cos - other * sin).to(x.dtype)
    out[..., pairs[1]] = (other * cos + one * sin).to(x.dtype)
    return out


def takes(adapter: Adapter, keys: Sequence[Tensor], cache_keys: Tensor) -> bool:
    """Whether the kernel can place these for this reader, there is one, and it is right on this GPU."""
    return (
        cache_keys.device.type == "cuda"
        and has_triton()
        and all(x.device == cache_keys.device and x.dtype == cache_keys.dtype for x in keys)
        and all(x.stride(-1) == 1 for x in (*keys[:1], cache_keys))
        and (form := form_of(adapter)) is not None
        and not why_not(form, cache_keys.device, cache_keys.dtype, cache_keys.shape[-1])
    )


@cache
@torch.inference_mode()
def why_not(form: Form, device: torch.device, dtype: torch.dtype, dim: int) -> str:
    """Why this GPU does without the kernel for such heads, "" where it serves. Compiles it, once a machine."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    try:
        for width in {dim, dim // 4 * 2}:  # all of a head, or a part
            angles = draw(90, width // 2)
            both = (
                angles.repeat_interleave(2, dim=-1) if form.step == 2 else torch.cat([angles, angles], dim=-1)
            )
            rope = Rope(both.cos(), both.sin())
            parts = [(5, draw(2, 40, dim), draw(2, 40, dim)), (50, draw(2, 33, dim), draw(2, 33, dim))]
            keys, values = draw(2, 90, dim), draw(2, 90, dim)
            wanted, plain = keys.clone(), values.clone()
            for start, k, v in parts:
                here = slice(start, start + k.shape[1])
                wanted[:, here], plain[:, here] = turned(form, k, rope.at(here)), v
            starts, ks, vs = zip(*parts, strict=True)
            place(ks, vs, starts, keys, values, rope.cos, rope.sin, form)
            off = float((keys.float() - wanted.float()).abs().max())
            if not off <= 2 * torch.finfo(dtype).eps or not torch.equal(values, plain):
                return f"off by {off:.3g}"
    except Exception as error:  # whatever a compiler or driver may say
        return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}".splitlines()[0]
    return ""


def place(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    starts: Sequence[int],
    cache_keys: Tensor,
    cache_values: Tensor,
    cos: Tensor,
    sin: Tensor,
    form: Form = HALVES,
) -> None:
    """Chunks' keys before RoPE and values [K, C, D] into one layer's cache [K, T, D], each from its start on.

    cos, sin [T, R] by position. Everything is on the device; nothing waits for it.
    """
    from blendserve.gpu.kernels.place import chunks_into_cache

    longest = max((k.shape[1] for k in keys), default=0)
    if not longest:
        return
    if any(start + k.shape[1] > cache_keys.shape[1] for k, start in zip(keys, starts, strict=True)):
        raise ValueError(f"a chunk ends behind the cache's {cache_keys.shape[1]} tokens")
    rows = [
        (k.data_ptr(), v.data_ptr(), start, k.shape[1], *k.stride()[:2], *v.stride()[:2])
        for k, v, start in zip(keys, values, starts, strict=True)
    ]
    aligned = all(number % 16 == 0 for row in rows for number in (*row[:2], *row[4:]))
    n_kv, _, dim = cache_keys.shape
    grid = (-(-longest // BLOCK), len(rows), n_kv)
    with torch.cuda.device(cache_keys.device if cache_keys.is_cuda else -1):  # triton launches where torch is
        chunks_into_cache[grid](
            _on(cache_keys.device, rows), cache_keys, cache_values, cos, sin,
            *cache_keys.stride()[:2], *cache_values.stride()[:2], cos.stride(0),
            DIM=dim, TURNED=cos.shape[-1], NEIGHBOURS=form.neighbours, STEP=form.step, WIDE=form.wide,
            ALIGNED=aligned, BLOCK=BLOCK, BLOCK_D=max(16, 1 << (dim - 1).bit_length()), num_warps=4,
        )  # fmt: skip


def _on(device: torch.device, rows: Sequence[tuple[int, ...]]) -> Tensor:
    """The table on the device; out of pinned memory, so that sending it holds nobody up."""
    table = torch.tensor(rows, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
