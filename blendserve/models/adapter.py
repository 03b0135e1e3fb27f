"""Low-rank adapters that are added to the weights of a model folder, once: W + a @ b."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file

from blendserve.errors import ModelError
from blendserve.models.fast_load import WEIGHTS

FOLDER = Path("adapters")  # of a checkout: the wheel has no adapters
CHECKOUT = Path(__file__).parents[2]  # if the package is installed as editable


class Adapter(NamedTuple):
    """A safetensors file with `NAME.a` [out, r] and `NAME.b` [r, in] for each weight NAME [out, in]."""

    file: str  # in FOLDER
    sha256: str

    def find(self) -> Path:
        """Return the file in CHECKOUT or in the checkout that is the current folder. Raises ModelError."""
        for checkout in (CHECKOUT, Path.cwd()):
            file = checkout / FOLDER / self.file
            if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == self.sha256:
                return file
        raise ModelError(
            f"the adapter {FOLDER / self.file} is missing or damaged, and not part of the installed package: "
            "run the command in a checkout of blendserve, which has it",
            setting="model.name",
            path=FOLDER / self.file,
        )

    def merge(self, folder: Path) -> None:
        """Add to the folder's weights: in fp32, rounded to the weight's dtype once. Raises ModelError."""
        factors = load_file(self.find())
        weights = load_file(folder / WEIGHTS)
        for name in {name.rpartition(".")[0] for name in factors}:
            weight = weights[name]
            a = factors[f"{name}.a"]
            b = factors[f"{name}.b"]
            weights[name] = (weight.float() + a.float() @ b.float()).to(weight.dtype)
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
