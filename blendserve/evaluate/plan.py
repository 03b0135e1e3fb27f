"""What a run is asked to do: its settings, its name, and the defaults that only evaluation has."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from blendserve.config import Config, DecodeConfig, Positive, PromptConfig, Ratio, Section, StoreConfig
from blendserve.evaluate.variants import Variant, variants
from blendserve.registry import EVALUATED

# Short answers: what F1 against short golds is fair to, and what the data sets were made for.
PROMPT = PromptConfig(
    system="You answer questions from the given passages.",
    instruction="Read the passages, then answer the question with a name, a date or a few words. Give the answer only.",
)
DECODE = DecodeConfig(max_new_tokens=32)
STORE = StoreConfig(cap_gb=8.0)  # questions done make room for the next ones


class EvaluateConfig(Section):
    """One run."""

    dataset: str = "generated"  # a name or a file, see datasets.py
    corpus: Path | None = None
    setting: Literal["closed", "open"] = "closed"
    window: Positive | None = None  # tokens; None = a chunk for each passage
    chunks: Positive | None = None  # of each prompt, at most; None = all
    top_k: Positive = 10  # passages retrieved, open setting only
    limit: Positive | None = None  # questions, the first ones
    half: Literal["both", "first", "second"] = (
        "both"  # of those: the 1st, 3rd, 5th ..., or the 2nd, 4th, 6th ...
    )
    seed: int = 0  # of policies that draw, and of distractors where a data set has none of its own
    methods: tuple[str, ...] = ("full", "prefix", "reuse", *EVALUATED)
    ratios: tuple[Ratio, ...] = (0.05, 0.15)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Raises ConfigError."""
        return variants(self.methods, self.ratios, self.seed)

    @property
    def name(self) -> str:
        """What the run is called unless the user says so: equal for runs over the same prompts."""
        window = f"-w{self.window}" if self.window else ""
        chunks = f"-c{self.chunks}" if self.chunks else ""
        top_k = f"-k{self.top_k}" if self.setting == "open" else ""
        return f"{Path(self.dataset).stem}-{self.setting}{top_k}{window}{chunks}"


def settings_from(config: Path | None = None) -> Config:
    """The settings of a file, or the defaults; where it says nothing, with evaluation's own. Raises ConfigError."""
    settings = Config.load(config) if config else Config()
    ours = {"prompt": PROMPT, "decode": DECODE, "store": STORE}
    unsaid = {name: part for name, part in ours.items() if name not in settings.model_fields_set}
    return settings.model_copy(update=unsaid)
