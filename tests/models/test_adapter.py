"""The bundled reading model: the bundled model plus its adapter, and nothing where the adapter is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from blendserve.config import ModelConfig
from blendserve.errors import ModelError
from blendserve.models import adapter
from blendserve.models.loader import load_model
from blendserve.models.sources import BUNDLED, bundled_folder
from tests.support.files import own_cache

READER = "smollm2-135m-reader"
UPDATE = cast(adapter.Adapter, BUNDLED[READER].adapter)
FILE = UPDATE.find()


def test_the_reading_model_is_the_bundled_one_plus_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    base, read = (load_file(bundled_folder(name) / "model.safetensors") for name in ("smollm2-135m", READER))
    factors = load_file(FILE)
    linear = {name for name, weight in base.items() if weight.ndim == 2 and "embed" not in name}
    assert {name.rpartition(".")[0] for name in factors} == linear
    assert read.keys() == base.keys()
    assert all(torch.equal(read[name], base[name]) for name in base.keys() - linear)
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.29.mlp.down_proj.weight"):
        a, b = (factors[f"{name}.{x}"].double().numpy() for x in "ab")
        exact = base[name].double().numpy() + np.einsum("or,ri->oi", a, b)
        assert not torch.equal(base[name], read[name])
        assert np.all(np.abs(read[name].double().numpy() - exact) <= np.abs(exact) * 2**-8 + 1e-9)  # bf16
    loaded = load_model(ModelConfig(name=READER, dtype="bfloat16", device="cpu"))
    assert loaded.name == READER
    assert loaded.fingerprint != load_model(ModelConfig(dtype="bfloat16", device="cpu")).fingerprint


@pytest.mark.parametrize("is_there", [True, False])
def test_a_damaged_adapter_is_refused_and_one_of_the_current_checkout_is_taken(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(adapter, "CHECKOUT", tmp_path / "site-packages")
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / adapter.FOLDER / FILE.name
    copy.parent.mkdir()
    if is_there:
        raw = bytearray(FILE.read_bytes())
        raw[-1] ^= 1
        copy.write_bytes(raw)
    with pytest.raises(ModelError) as error:
        bundled_folder(READER)
    assert (error.value.setting, error.value.path) == ("model.name", str(adapter.FOLDER / FILE.name))
    assert list((tmp_path / "cache" / "blendserve" / "readers").iterdir()) == []
    copy.write_bytes(FILE.read_bytes())
    assert UPDATE.find() == copy
