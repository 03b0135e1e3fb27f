"""A model of random weights, made in seconds however large it is, and a tokenizer for one that has none.

For measuring speed, which does not depend on weights. The same configuration, dtype and seed give the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

TILE = 4_194_301  # numbers drawn, and then repeated; a prime, so that the rows of a matrix differ
STD = 0.02  # as most families are initialised


class _Uninitialised(TorchFunctionMode):
    """Leaves out torch's initialisers, whose numbers would be overwritten."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@torch.no_grad()
def random_model(config: Any, dtype: torch.dtype, seed: int = 0, device: torch.device | None = None) -> Any:
    """A model of this configuration. Norms scale by one; everything else is normal, of a deviation of 0.02.

    Made on the device itself: gigabytes of weights need not travel there.
    """
    from transformers import AutoModelForCausalLM

    device = device or torch.device("cpu")
    with _Uninitialised(), device:
        model: Any = cast(Any, AutoModelForCausalLM).from_config(config, dtype=dtype)
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    tile = torch.randn(TILE, generator=generator).mul_(STD).to(dtype).repeat(2).to(device)
    for name, weights in model.named_parameters():  # tied ones once
        if weights.dim() == 1 and name.endswith("weight"):
            weights.fill_(1.0)
        else:
            _fill(weights.view(-1), tile, int(torch.randint(TILE, (), generator=generator)))
    return model


def _fill(flat: Tensor, tile: Tensor, start: int) -> None:
    for at in range(0, len(flat), TILE):
        part = flat[at : at + TILE]
        part.copy_(tile[start : start + len(part)])


class Folded:
    """A tokenizer whose ids are folded into a smaller vocabulary: as much work as its own, other tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self.eos_token_id = tokenizer.eos_token_id % vocab_size

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [i % self._size for i in self._tokenizer(text, **options)["input_ids"]]}

    def __deepcopy__(self, memo: Any) -> Folded:
        return Folded(copy.deepcopy(self._tokenizer, memo), self._size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
