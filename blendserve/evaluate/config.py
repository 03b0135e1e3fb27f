"""Settings of an evaluation, and the defaults that only evaluation has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from blendserve.config import Config, DecodeConfig, Positive, PromptConfig, Ratio, Settings, StoreConfig
from blendserve.errors import ConfigError
from blendserve.evaluate import edits
from blendserve.evaluate.methods import DEFAULT, MethodSpec, parse_methods
from blendserve.registry import EVALUATED

Layout = Literal["own", "langchain", "question_first", "tool"]
OWN: Layout = "own"

# Short answers: the data sets expect them, and F1 against short golds is fair to nothing else.
PROMPT = PromptConfig(
    system="You answer questions from the given passages.",
    instruction="Read the passages, then answer the question with a name, a date or a few words. Give the answer only.",
)
DECODE = DecodeConfig(max_new_tokens=32)
STORE = StoreConfig(cap_gb=8.0)  # chunks of finished questions are evicted


class EvaluateConfig(Settings):
    """One run."""

    dataset: str = "generated"
    """Data set: generated, facts, reference, ruler/TASK/LENGTH such as ruler/variables/8k, a LongBench task such as
    2wikimqa or samsum, a file in a known format, or a .txt file to continue. Several data sets, separated by commas, make
    one table."""
    corpus: Path | None = None
    """File with passages; by default corpus.json in the folder of the questions."""
    setting: Literal["closed", "open", "edited"] = "closed"
    """Passages of a question: closed uses the data set's own, open retrieves them, edited uses the data set's own while
    the store has earlier revisions of them, for every kind of edit."""
    layout: Layout = OWN
    """Layout of the prompts: own, or that of a client's plain prompt. langchain pastes the passages into the system
    message, question_first after the question, tool into a tool message."""
    window: Positive | None = None
    """Chunk length, in tokens of the joined passages; a chunk per passage if not set."""
    chunks: Positive | None = None
    """Maximum number of chunks in a prompt; all if not set."""
    top_k: Positive = 10
    """Number of passages to retrieve in the open setting."""
    limit: Positive | None = None
    """Number of questions to ask; all if not set."""
    half: Literal["both", "first", "second"] = "both"
    """Half of the questions to ask (every other one): choose settings on one half, confirm them on the other."""
    shuffles: Annotated[int, Field(ge=0)] = 0
    """Number of extra prompts per question, with its passages in other orders."""
    max_new_tokens: Positive | None = None
    """Maximum length of an answer, in tokens; the task's own if not set."""
    seed: int = 0
    """Random seed of distractors (for data sets without any) and shuffles."""
    methods: tuple[str, ...] = ("full", "prefix", "reuse", *EVALUATED)
    """Methods, such as prefix, query+shift, deviation[1,2]@0.15, query/bos or exact/int8."""
    ratios: tuple[Ratio, ...] = (0.05, 0.15)
    """Recompute ratios of methods that name none."""

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The methods; in the edited setting also each over every kind of edit. Raises ConfigError."""
        words = list(self.methods)
        if self.layout != OWN and self.setting == "edited":
            raise ConfigError("edited passages need --layout own: plain prompts reuse only whole chunks")
        if self.setting == "edited":
            words = [DEFAULT] if self.methods == EvaluateConfig().methods else words
            plain = parse_methods(words, self.ratios, coded=True)
            names = [m.name for m in plain if m.kind == "blend" and not (m.edit or m.codec)]
            kinds = (edits.ANSWER,) if self.dataset == "facts" else edits.EDITS
            words += [f"{name}/{kind}" for name in names for kind in kinds]
        return parse_methods(words, self.ratios, coded=self.layout == OWN)

    @property
    def subset(self) -> slice:
        """The questions to ask."""
        return {"both": slice(None), "first": slice(0, None, 2), "second": slice(1, None, 2)}[self.half]

    @property
    def run_name(self) -> str:
        """The default name of the run: equal for runs over the same prompts."""
        parts = {"k": self.setting == "open" and self.top_k, "w": self.window, "c": self.chunks}
        layout = () if self.layout == OWN else (self.layout,)
        cut = (f"{name}{n}" for name, n in parts.items() if n)
        return "-".join([Path(self.dataset).stem, self.setting, *layout, *cut])


def settings_from(config: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The settings of a file, the environment and overrides, with evaluation's own defaults. Raises ConfigError."""
    settings = Config.load(config, overrides)
    ours = {"prompt": PROMPT, "decode": DECODE, "store": STORE}
    return settings.model_copy(update={n: p for n, p in ours.items() if n not in settings.model_fields_set})
