"""CacheBlend's rule (arXiv 2405.16444, section 4.3): the largest squared L2 of fresh V - stored V at a check layer.

All rows run through the layers below the check layer. Several check layers are the paper's gradual filtering: the
share kept falls linearly from twice the ratio to the ratio. The released code compares V alone, as here.
"""

from __future__ import annotations

from torch import Tensor

from blendserve.blend.layout import LayerKV, Layout
from blendserve.blend.policies.base import Policy
from blendserve.errors import ConfigError


class DeviationPolicy(Policy):
    """Reads `check_layers`."""

    has_check_layers = True

    def validate(self, n_layers: int) -> None:
        layers = self.config.check_layers
        if not 0 < max(layers, default=0) < n_layers:
            raise ConfigError(
                f"setting 'blend.check_layers' cannot be {list(layers)}: name at least one layer, "
                f"from 1 to the model's last, {n_layers - 1}",
                setting="blend.check_layers",
            )

    @property
    def check_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.config.check_layers)))

    def score(self, fresh: LayerKV, stored: LayerKV) -> Tensor:
        return (fresh[1].float() - stored[1].float()).square().sum(dim=(0, 2))

    def n_kept(self, l: int, layout: Layout) -> int:
        checks = self.check_layers
        left = len(checks) - 1 - checks.index(l)
        return layout.budget(min(1.0, self.config.min_ratio * (1 + left / max(1, len(checks) - 1))))
