"""Settings of the engine, a section for each stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from blendserve.config.base import Section
from blendserve.registry import CORRECTIONS, POLICIES

Method = Literal["auto", "blend", "full", "prefix", "reuse"]
PolicyName = Annotated[str, AfterValidator(POLICIES.check)]
CorrectionName = Annotated[str, AfterValidator(CORRECTIONS.check)]
KVContext = Literal["prefix", "primer", "bos", "none"]


def _separator(text: str) -> str:
    """Raises ValueError for white space alone, which ordinary text is full of."""
    if text and not text.strip():
        raise ValueError("a separator of white space alone would cut ordinary text: add other characters")
    return text


def _auto_ratio(text: str) -> str:
    """Raises ValueError."""
    word, colon, least = text.partition(":")
    if word != "auto" or (colon and not 0 <= float(least) <= 1):
        raise ValueError("a ratio is a number from 0 to 1, auto, or auto:R with its minimum")
    return text


Dtype = Literal["auto", "bfloat16", "float16", "float32"]

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
AutoRatio = Annotated[str, AfterValidator(_auto_ratio)]
AUTO_MIN_RATIO = 0.05
Positive = Annotated[int, Field(gt=0)]


class RuntimeConfig(Section):
    """What a model runs on, and in which number format."""

    dtype: Dtype = "auto"
    """Number format of weights, computation and KV; auto chooses the fastest one of the device."""
    device: str = "auto"
    """Device to run on, such as cpu or cuda:1; auto chooses a GPU if there is one."""
    threads: Positive | None = None
    """Number of CPU threads; all CPUs that the process may use if not set."""
    decode_weights: Literal["model", "int8"] = "model"
    """Weights for decoding on a CPU: the model's own, or an int8 copy, which is faster and approximate. Prefill and
    stored KV always use the model's own."""


class ModelConfig(RuntimeConfig):
    """The language model that answers."""

    name: str = "smollm2-135m"
    """Model: a bundled name, a folder, a Hugging Face id, or random:SHAPE for random weights."""


class RetrieveConfig(Section):
    """Documents to passages to nearest passages."""

    embedder: str = "minilm-l6"
    """Embedding model: a bundled name, a folder or a Hugging Face id."""
    chunk_tokens: Positive = 512
    """Maximum length of a passage, in tokens of the model, title line included."""
    top_k: Positive = 6
    """Number of passages to retrieve for a question."""
    index: Literal["flat", "hnsw"] = "flat"
    """Vector search: flat is exact, hnsw is approximate and faster on large corpora."""


class PromptConfig(Section):
    """The words around the chunks."""

    system: str = "You answer questions from the given passages, briefly and in your own words."
    """System message."""
    instruction: str = "Read the passages, then answer the question."
    """Instruction before the passages."""
    kv_context: KVContext = "prefix"
    """Text that chunk KV is computed after; with prefix, the first chunk of a prompt is exact."""
    separator: Annotated[str, AfterValidator(_separator)] = ""
    """Text that separates chunks inside a question, such as ' # # ': each part before the last is a chunk, the last
    part is the question; empty turns this off."""


class BlendConfig(Section):
    """Which tokens are recomputed, and what is done for the others."""

    method: Method = "auto"
    """How cached KV is used; auto chooses the fastest method for the prompt on this machine."""
    policy: PolicyName = POLICIES.default
    """Policy that selects the tokens to recompute."""
    ratio: Ratio | AutoRatio = 0.05
    """Fraction of the context tokens to recompute; auto recomputes as many as fit into the loading time, auto:R at
    least the fraction R."""
    correction: CorrectionName = CORRECTIONS.default
    """Correction of the KV of tokens that are not recomputed."""
    check_layers: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """Layers at which a policy that compares layers selects tokens; several layers narrow the selection step by
    step."""
    near: bool = False
    """Reuse the KV of identical text in similar cached chunks (near-duplicates)."""

    @property
    def min_ratio(self) -> float:
        """The least fraction that is recomputed: the ratio, or the one of auto:R."""
        if not isinstance(self.ratio, str):
            return self.ratio
        return float(self.ratio.partition(":")[2] or AUTO_MIN_RATIO)


class DecodeConfig(Section):
    """How the answer is written."""

    max_new_tokens: Positive = 64
    """Maximum length of an answer, in tokens."""
    temperature: float = Field(0.0, ge=0.0)
    """Sampling temperature; 0 is greedy decoding."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: draw from the likeliest tokens whose probabilities sum to this."""
    seed: int = 0
    """Random seed of sampling."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    drafts: bool = True
    """Draft tokens that repeat prompt or answer, and check several in one step. The answer is the same, and comes
    sooner where it quotes. For models whose step is one native call."""
