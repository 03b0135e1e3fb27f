"""The effect of an error in a chunk's KV on the model's next tokens: the Fisher information of stored keys and values.

    chunk (KV without a gradient)  ->  text after it, which attends to that KV  ->  tokens drawn by the model
    gradient of their log probability to each token's key and value  ->  mean of g g^T over tokens, [L, 2, K D, K D]

To second order, an error e costs e^T F e / 2 of Kullback-Leibler divergence (Amari, Natural gradient, 1998, section 2).

A few tokens hold most of that information, most of all the first, the attention sink. In a prompt the sink is in the
prefix, which is stored uncoded, so it is left out here. Every other token is weighted by the root of its information, or
a few dozen tokens would dominate the mean (docs/research/decisions.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from blendserve.core import TokenIds, run
from blendserve.kernels.ops import attend
from blendserve.kernels.rows import Rows, plan_layers
from blendserve.kernels.types import Rope
from blendserve.models.forward import LayerPass, run_layers
from blendserve.models.model import DecoderModel, Projected

CHUNK, BEHIND = 320, 96  # tokens of the chunk, and of the text that attends to it
WINDOW = CHUNK + BEHIND
TINY = 1e-30  # information of a token that no token attends to


class _Pass(LayerPass):
    """A pass over n tokens of a text that keeps their KV before RoPE.

    before: a pass over the tokens in front of them, with gradients to its KV. only_first: stop after layer 0's KV.
    """

    def __init__(
        self, model: DecoderModel, n: int, before: _Pass | None = None, only_first: bool = False
    ) -> None:
        self._model = model
        self._before = before
        self._only_first = only_first
        self.leaves = (
            [tuple(x.detach().clone().requires_grad_() for x in kv) for kv in before.kv] if before else []
        )
        start: int = before.stop if before else 0
        rows = Rows.on(model.device, torch.arange(start, start + n))
        self.stop: int = start + n
        self._ropes = model.rope(rows.device)
        self._plans = plan_layers(rows, model.attention_forms)
        self.kv: list[tuple[Tensor, Tensor]] = []

    def rope(self, l: int) -> Rope:
        return self._ropes[l]

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        self.kv.append((fresh.k, fresh.v))
        self._keys, self._values = keys, fresh.v
        if self._before:
            keys_before = self._model.rotate(self.leaves[l][0], self._before.rope(l))
            self._keys = torch.cat((keys_before, keys), dim=1)
            self._values = torch.cat((self.leaves[l][1], fresh.v), dim=1)

    def attend(self, l: int, q: Tensor) -> Tensor | None:
        if self._only_first:
            return None
        return attend(q, self._keys, self._values, self._model.specs[l], self._plans[l])


class ModelSensitivity:
    """A model as codecs learn from it: a FittedModel of store/codecs/base.py."""

    window = WINDOW

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.n_embeddings: int = model.reference.get_input_embeddings().num_embeddings  # type: ignore[operator]

    def first_layer(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys before RoPE and values of layer 0 [K, n, D]; they depend on the token alone."""
        model = self._model
        with torch.inference_mode():
            layers = _Pass(model, len(ids), only_first=True)
            run(run_layers(model, model.embed(torch.tensor(ids, device=model.device)), layers))
        return layers.kv[0]

    def sensitivity(
        self, ids: TokenIds, windows: int, progress: Callable[[], None] = lambda: None
    ) -> Tensor | None:
        """Mean outer products of gradients [L, 2, K * D, K * D] over windows of the text; None for too little text.

        A token's product is divided by the root of its trace over all layers, keys and values.
        """
        starts = [n * WINDOW for n in range(min(windows, len(ids) // WINDOW))]
        if not starts:
            return None
        n = self._model.kv_shapes[0].numbers // 2
        total = torch.zeros(self._model.n_layers, 2, n, n)
        generator = torch.Generator().manual_seed(0)
        for start in starts:
            pairs = gradients(self._model, ids[start : start + WINDOW], generator)
            # of all tokens but the first, [L, 2, K, C - 1, D]
            both = torch.stack([torch.stack(pair) for pair in pairs])[..., 1:, :].float().cpu()
            rows = both.transpose(2, 3).flatten(3)  # [L, 2, C - 1, K * D]
            weighed = rows * rows.square().sum(dim=(0, 1, 3), keepdim=True).clamp(min=TINY) ** -0.25
            total += weighed.transpose(-1, -2) @ weighed
            progress()
        return total / ((CHUNK - 1) * len(starts))


def gradients(model: DecoderModel, ids: TokenIds, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
    """The gradients of one window: by layer, to keys and values [K, C, D]."""
    tokens = torch.tensor(ids, device=model.device)
    with torch.no_grad():
        chunk = _Pass(model, CHUNK)
        run(run_layers(model, model.embed(tokens[:CHUNK]), chunk))
    with torch.enable_grad():
        text = _Pass(model, len(ids) - CHUNK, before=chunk)
        hidden = run(run_layers(model, cast(Tensor, model.embed(tokens[CHUNK:])).detach(), text))
        log = model.logits(hidden).float().log_softmax(dim=-1)
        drawn = torch.multinomial(log.detach().exp().cpu(), 1, generator=generator).to(log.device)
        leaves = [x for pair in text.leaves for x in pair]
        found = torch.autograd.grad(log.gather(1, drawn).sum(), leaves)
    return list(zip(found[::2], found[1::2], strict=True))
