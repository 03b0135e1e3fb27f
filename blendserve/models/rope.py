"""Rotation angles of a decoder: cos and sin of every position, by the frequencies of the configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blendserve.kernels.rotary import Rotary
from blendserve.kernels.types import Rope


class RopeAngles:
    """The angles of one kind of layer."""

    def __init__(
        self, config: Any, head_dim: int, rotary: Rotary, layer_type: str, dtype: torch.dtype
    ) -> None:
        """layer_type: a key of config.rope_parameters; "" = all layers share one set. dtype: of cos and sin."""
        parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            n = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
            steps = torch.arange(0, n, 2, dtype=torch.float) / n
            self._frequencies, self._scale = 1.0 / (parameters["rope_theta"] ** steps), 1.0
        else:
            from transformers import AutoConfig, PreTrainedConfig  # seconds to import
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            own = config if isinstance(config, PreTrainedConfig) else AutoConfig.for_model(**config.to_dict())
            by_type = {"layer_type": layer_type} if layer_type else {}
            self._frequencies, self._scale = ROPE_INIT_FUNCTIONS[kind](own, **by_type)
        self._interleaved, self._dtype = rotary.step == 2, dtype

    def __call__(self, positions: Tensor) -> Rope:
        """Positions [S] -> cos and sin [S, R], R <= D the rotated dims."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None].float() * self._frequencies
        twice = (
            angles.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat((angles, angles), dim=-1)
        )
        return Rope((twice.cos() * self._scale).to(self._dtype), (twice.sin() * self._scale).to(self._dtype))
