"""What a run is asked to do: its settings, its name, and the defaults that only evaluation has."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from blendserve.config import Config, DecodeConfig, Positive, PromptConfig, Ratio, Section, StoreConfig
from blendserve.evaluate import edits
from blendserve.evaluate.methods import DEFAULT, MethodSpec, parse_methods
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
        description="Questions: generated, facts, lines, reference, 2wikimultihopqa, a LongBench task "
        "such as 2wikimqa or samsum, a file of questions in a known format, or a .txt file to continue; several "
        "with commas between them make one table.",
    )
    corpus: Path | None = Field(
        None,
        description="File of passages; corpus.json in the folder of the questions if not set.",
    )
    setting: Literal["closed", "open", "edited"] = Field(
        "closed",
        description="Passages of a question: closed uses the data set's own, open retrieves them, edited uses the "
        "data set's own while the store holds earlier revisions of them, by every kind of edit.",
    )
    window: Positive | None = Field(
        None,
        description="Length of the chunks that the joined passages are cut into, in tokens; a chunk per "
        "passage if not set.",
    )
    chunks: Positive | None = Field(None, description="Maximum number of chunks in a prompt; all if not set.")
    top_k: Positive = Field(10, description="Number of passages to retrieve in the open setting.")
    limit: Positive | None = Field(
        None, description="Number of questions, from the first on; all if not set."
    )
    half: Literal["both", "first", "second"] = Field(
        "both", description="Half of the questions (every other one): tune on one half, confirm on the other."
    )
    shuffles: int = Field(
        0,
        ge=0,
        description="Number of further prompts per question, with its passages in other orders.",
    )
    seed: int = Field(
        0,
        description="Random seed of distractors (for data sets that have none), shuffles, and policies "
        "that sample.",
    )
    methods: tuple[str, ...] = Field(
        ("full", "prefix", "reuse", *EVALUATED),
        description="Methods to compare, such as prefix, query+shift, deviation[1,2]@0.15, query/bos or "
        "exact/int8.",
    )
    ratios: tuple[Ratio, ...] = Field((0.05, 0.15), description="Recompute ratios of methods that name none.")

    @property
    def variants(self) -> tuple[MethodSpec, ...]:
        """Raises ConfigError."""
        words = [*self.methods]
        if self.setting == "edited":
            words = [*EDITED] if self.methods == EvaluateConfig().methods else words
            plain = parse_methods(words, self.ratios, self.seed, coded=True)
            made = [v.name for v in plain if v.kind == "blend" and not (v.edit or v.codec)]
            words += [f"{name}/{edit}" for name in made for edit in self.edits]
        return parse_methods(words, self.ratios, self.seed, coded=True)

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
