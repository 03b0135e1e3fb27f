"""The two halves of a layer around attention, each as one native call, where a model's forms have kernels.

They run the kernels of the layer loop in the same order, so the bits are the same. The loop stays as the plain form. It
also serves in fp32, where linear layers are torch's, and wherever torch's linear layers were measured to be faster.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blendserve.kernels import switches
from blendserve.kernels.cpu.bindings import FEW
from blendserve.kernels.cpu.decoder import NativeLayers, unsupported
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.ops import linear
from blendserve.models.model import DecoderModel
from blendserve.models.native_weights import decode_weights

_TITLES = {f"{level.title} kernel": level for level in LEVELS.values()}
_bound: WeakKeyDictionary[DecoderModel, dict[tuple[bool, int], NativeLayers | None]] = WeakKeyDictionary()


def native_layers(model: DecoderModel, n_rows: int) -> NativeLayers | None:
    """For a pass of so many rows; None: the layer loop runs. Bound once for few rows and once for more."""
    if model.device.type != "cpu" or torch.is_grad_enabled() or not switches.is_native_on():
        return None
    bound = _bound.setdefault(model, {})
    kind = n_rows <= FEW, torch.get_num_threads()
    if kind not in bound:
        bound[kind] = None  # while the comparison runs the loop
        bound[kind] = _bind(model, FEW if kind[0] else FEW + 1)
    return bound[kind]


def _bind(model: DecoderModel, n_rows: int) -> NativeLayers | None:
    """Raises nothing: a model without such kernels has none."""
    try:
        weights = decode_weights(model)
    except ValueError:
        return None
    layer = weights.layers[0]
    matrices = [
        weight for weight, _ in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    ]
    level = _level(matrices, n_rows)
    if level is None or unsupported(level, weights):
        return None
    found = NativeLayers(level, weights, model.rope_tables[0])
    return found if _is_equal(model, found, n_rows) else None


def _level(matrices: list[Tensor], n_rows: int) -> Level | None:
    """The instruction set that computes all of these linear layers, if it is one."""
    names = {linear.select(x.new_zeros(n_rows, x.shape[1]), x, None).name for x in matrices}
    level = _TITLES.get(names.pop()) if len(names) == 1 else None
    return level if level is not None and "layer_qkv" in level.sources else None


@torch.inference_mode()
def _is_equal(model: DecoderModel, found: NativeLayers, n_rows: int) -> bool:
    """Whether the first and the last layer give the loop's bits, for random rows."""
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> Tensor:
        return torch.randn(n_rows, width, generator=generator).to(model.dtype)

    ropes = model.rope(3 * torch.arange(n_rows))
    for l in {0, model.n_layers - 1}:
        hidden, rope = draw(model.embeddings.shape[1]), ropes[l]
        if rope.cos.dtype != model.dtype:
            return False
        fresh = model.project(l, hidden)
        wanted = fresh.q, fresh.k, fresh.v, model.rotate(fresh.q, rope), model.rotate(fresh.k, rope)
        attended = draw(model.n_heads * model.head_dim)
        pairs = zip(
            (*found.qkv(l, hidden, rope), found.out(l, hidden, attended)),
            (*wanted, model.finish(l, hidden, attended)),
            strict=True,
        )
        if not all(torch.equal(got, right) for got, right in pairs):
            return False
    return True
