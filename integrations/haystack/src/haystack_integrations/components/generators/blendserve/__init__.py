"""Generator of Haystack for a blendserve server."""

from haystack_integrations.components.generators.blendserve.generator import BlendserveGenerator

__all__ = ["BlendserveGenerator"]
