"""Response synthesizer of LlamaIndex for a blendserve server."""

from llama_index.response_synthesizers.blendserve.base import BlendserveSynthesizer

__all__ = ["BlendserveSynthesizer"]
