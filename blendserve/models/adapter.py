"""Low-rank adapters that are added to the weights of a model folder, once: W + a @ b."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file

from blendserve.errors import ModelError
from blendserve.models.fast_load import WEIGHTS

DATA = Path(__file__).with_name("data")


class Adapter(NamedTuple):
    """A safetensors file with `NAME.a` [out, r] and `NAME.b` [r, in] for each weight NAME [out, in]."""

    file: str  # in DATA
    sha256: str

    def merge(self, folder: Path) -> None:
        """Add to the folder's weights: in fp32, rounded to the weight's dtype once. Raises ModelError."""
        file, path = DATA / self.file, folder / WEIGHTS
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != self.sha256:
            raise ModelError(
                f"the adapter {file} is missing or damaged: reinstall blendserve, or restore the file in a checkout",
                setting="model.name",
                path=file,
            )
        factors, weights = load_file(file), load_file(path)
        for name in {name.rpartition(".")[0] for name in factors}:
            weight, a, b = weights[name], factors[f"{name}.a"], factors[f"{name}.b"]
            weights[name] = (weight.float() + a.float() @ b.float()).to(weight.dtype)
        save_file(weights, path, {"format": "pt"})
