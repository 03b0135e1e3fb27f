"""The reader's model is borrowed: it is handed back as it came, whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blended, Blender
from blendserve.config import BlendConfig
from blendserve.store import MemoryStore
from blendserve.store.memory import MemoryChunk
from tests.blend.test_blender import GIB, PREFIX, PROMPT, Leaky, ids
from tests.support.models import fresh_model


def state_of(model: Any) -> dict[str, Any]:
    """Everything that a borrower might leave behind."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "buffers": {name: tensor.clone() for name, tensor in model.named_buffers()},
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "training": [module.training for module in model.modules()],
        "grad": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [sorted(getattr(module, hook)) for module in model.modules() for hook in hooks],
        "own": [sorted(vars(module)) for module in model.modules()],
    }


def assert_untouched(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, was in before.items():
        if name in {"weights", "buffers"}:
            assert was.keys() == after[name].keys()
            assert all(torch.equal(was[key], after[name][key]) for key in was)
        else:
            assert was == after[name]


def use(maker: Blender, runs: Sequence[BlendConfig]) -> list[Blended]:
    maker.precompute(ids())
    return [maker.run(PROMPT, options) for options in runs]


def test_the_borrowed_model_is_handed_back_as_it_came() -> None:
    adapter = fresh_model("llama")
    before = state_of(adapter.model)
    store = Leaky()
    maker = Blender(adapter, "fingerprint", store, PREFIX, PREFIX)
    use(maker, [BlendConfig(policy=p) for p in ("query", "deviation", "all")])
    store.broken = {maker.key(ids()[1])}
    maker.run(PROMPT, BlendConfig(method="blend"))
    assert_untouched(before, state_of(adapter.model))


def test_the_borrowed_model_is_handed_back_after_an_exception_midway(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = fresh_model("llama")
    before = state_of(adapter.model)
    maker = Blender(adapter, "fingerprint", MemoryStore(GIB), PREFIX, PREFIX)
    (good,) = use(maker, [BlendConfig(method="blend")])

    def fails(self: Any, l: int) -> Any:
        if l == 2:
            raise KeyboardInterrupt
        return self.kv.keys[l], self.kv.values[l]

    with monkeypatch.context() as patch:
        patch.setattr(MemoryChunk, "layer", fails)
        with pytest.raises(KeyboardInterrupt):
            maker.run(PROMPT, BlendConfig(method="blend"))
    assert_untouched(before, state_of(adapter.model))
    assert torch.equal(maker.run(PROMPT, BlendConfig(method="blend")).prefilled.logits, good.prefilled.logits)
