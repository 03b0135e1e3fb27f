"""A matrix of weights as a model file holds it: quantised in blocks along its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """The weights of a linear layer or an embedding in blocks of GGUF. A row can be moved whole."""

    kind: str  # as the package gguf names it: Q4_0, Q8_0, Q4_K, ...
    shape: tuple[int, int]  # [outputs, inputs]
    blocks: npt.NDArray[np.uint8]  # [outputs, bytes of a row]; may be a view of a mapped file

    def dequantise(self) -> Tensor:
        """[outputs, inputs] in fp32, to the bit as the package gguf, which must be installed. Takes seconds."""
        from gguf import GGMLQuantizationType, dequantize  # optional

        return torch.from_numpy(dequantize(self.blocks, GGMLQuantizationType[self.kind]).reshape(self.shape))


Weights = Tensor | QuantisedMatrix
