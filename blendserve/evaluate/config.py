"""What a run is asked to do: its settings, its name, and the defaults that only evaluation has."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from blendserve.config import Config, DecodeConfig, Positive, PromptConfig, Ratio, Section, StoreConfig
from blendserve.evaluate import edits
from blendserve.evaluate.variants import DEFAULT, Variant, variants
from blendserve.registry import EVALUATED

# Short answers: what F1 against short golds is fair to, and what the data sets were made for.
PROMPT = PromptConfig(
    system="You answer questions from the given passages.",
    instruction="Read the passages, then answer the question with a name, a date or a few words. Give the answer only.",
)
DECODE = DecodeConfig(max_new_tokens=32)
STORE = StoreConfig(cap_gb=8.0)  # questions done make room for the next ones


EDITED = (DEFAULT,)  # where nothing else is asked for in the edited setting


class EvaluateConfig(Section):
    """One run."""

    dataset: str = Field(
        "generated",
        description="Ask questions from generated, facts, lines, reference, 2wikimultihopqa, a task of LongBench "
        "such as 2wikimqa or samsum, or a file: questions in a known form, or a .txt to go on with.",
    )
    corpus: Path | None = Field(
        None,
        description="Take passages from this file; it is corpus.json beside the questions if none is given.",
    )
    setting: Literal["closed", "open", "edited"] = Field(
        "closed",
        description="Give a question the passages that come with it (closed), retrieve them (open), or give it those "
        "that come with it where earlier revisions of them are stored, by every kind of edit (edited).",
    )
    window: Positive | None = Field(
        None,
        description="Cut the joined passages into chunks of so many tokens; without it a chunk is a passage.",
    )
    chunks: Positive | None = Field(
        None, description="Give a prompt so many chunks at most; all if none is given."
    )
    top_k: Positive = Field(10, description="Retrieve so many passages in the open setting.")
    limit: Positive | None = Field(None, description="Ask the first so many questions; all if none is given.")
    half: Literal["both", "first", "second"] = Field(
        "both", description="Ask every other question, to choose on one half and to confirm on the other."
    )
    shuffles: int = Field(
        0,
        ge=0,
        description="Ask each question so many times more, with its passages in other orders.",
    )
    seed: int = Field(
        0,
        description="Draw by this seed: distractors, where a data set has none, the orders of shuffles, and tokens, "
        "where a policy draws.",
    )
    methods: tuple[str, ...] = Field(
        ("full", "prefix", "reuse", *EVALUATED),
        description="Compare these methods, in words such as prefix, query+shift, deviation[1,2]@0.15, query/bos or "
        "exact/int8.",
    )
    ratios: tuple[Ratio, ...] = Field(
        (0.05, 0.15), description="Give methods that name no ratio each of these."
    )

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Raises ConfigError."""
        words = [*self.methods]
        if self.setting == "edited":
            words = [*EDITED] if self.methods == EvaluateConfig().methods else words
            plain = variants(words, self.ratios, self.seed, coded=True)
            made = [v.name for v in plain if v.kind == "blend" and not (v.edit or v.codec)]
            words += [f"{name}/{edit}" for name in made for edit in self.edits]
        return variants(words, self.ratios, self.seed, coded=True)

    @property
    def edits(self) -> tuple[str, ...]:
        """The kinds of edit that the edited setting compares: of facts, the one that changes the answer."""
        return (edits.ANSWER,) if self.dataset == "facts" else edits.EDITS

    @property
    def part(self) -> slice:
        """Which of the questions are asked."""
        return {"both": slice(None), "first": slice(0, None, 2), "second": slice(1, None, 2)}[self.half]

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
