"""All settings: one frozen section per stage inside one Config. Every default of the project is written here, once.

The command line takes its defaults from these classes; a YAML file names only what it changes. A wrong value is refused
here, before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from blendserve.errors import ConfigError
from blendserve.registry import CORRECTIONS, POLICIES, nearest

Method = Literal["auto", "blend", "full", "prefix", "reuse"]
PolicyName = Annotated[
    str, AfterValidator(POLICIES.check), Field(json_schema_extra={"enum": list(POLICIES.names)})
]
CorrectionName = Annotated[
    str, AfterValidator(CORRECTIONS.check), Field(json_schema_extra={"enum": list(CORRECTIONS.names)})
]
Behind = Literal["prefix", "primer", "bos", "none"]

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A frozen group of settings that refuses names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    inside: ClassVar[str] = ""  # of which section it is a part

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None


class ReaderConfig(Section):
    """The language model."""

    model: str = "smollm2-135m"  # a bundled name, a local folder or a hub id
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    threads: int | None = None  # CPU threads; None = as many as this process may use CPUs


class RetrieveConfig(Section):
    """Documents to passages to nearest passages."""

    embedder: str = "minilm-l6"  # a bundled name, a local folder or a hub id
    chunk_tokens: Positive = 512  # of the reader, title line included
    top_k: Positive = 6
    index: Literal["flat", "hnsw"] = "flat"


class PromptConfig(Section):
    """The words around the chunks."""

    system: str = "You answer questions from the given passages, briefly and in your own words."
    instruction: str = "Read the passages, then answer the question."
    behind: Behind = (
        "prefix"  # what a chunk's KV is computed behind; only "prefix" makes the first chunk exact
    )


class TiersConfig(Section):
    """Copies of hot chunks nearer to a GPU than the store is. Bytes, 0 = none."""

    inside = "store."
    device_bytes: Annotated[int, Field(ge=0)] = 0  # of the GPU's memory, beside the model and the caches
    host_bytes: Annotated[int, Field(ge=0)] = 0  # of pinned host memory


class StoreConfig(Section):
    """Where chunk KV lives."""

    kind: Literal["lmdb", "memory"] = "lmdb"
    path: Path | None = None  # None = <index>/kv
    cap_gb: Annotated[float, Field(gt=0)] = 32.0  # payload bytes / 1e9; the file is a little larger
    eviction: Literal["lru", "refuse"] = "lru"  # what makes room at the cap; pinned chunks never do
    admission: Literal["tinylfu", "always"] = (
        "tinylfu"  # what a chunk on demand must be to be let in at the cap
    )
    write_back: bool = True  # store chunks that a request found missing or corrupt, after its answer
    namespace: str = ""  # tenant salt, part of every key
    tiers: TiersConfig = TiersConfig()


class BlendConfig(Section):
    """Which tokens are recomputed, and what is done for the others."""

    method: Method = "auto"  # the cheapest of blend, prefix and full, by a cost model of this machine
    policy: PolicyName = POLICIES.default
    ratio: Ratio | Literal["auto"] = 0.15  # share of the context tokens; "auto": as many as loading hides
    floor: Ratio = 0.05  # ratio "auto" recomputes no less
    correction: CorrectionName = CORRECTIONS.default
    check_layers: tuple[Annotated[int, Field(ge=1)], ...] = (
        1,
    )  # for policies that check deviations; several = gradual filtering
    seed: int = 0  # `random` only

    @property
    def share(self) -> float:
        """The ratio as a number; "auto" is at least its floor (blend/cost.py finds out what it is)."""
        return self.floor if self.ratio == "auto" else self.ratio


class DecodeConfig(Section):
    """How the answer is written."""

    max_new_tokens: Positive = 64
    temperature: Annotated[float, Field(ge=0.0)] = 0.0  # 0 = greedy
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


class Config(Section):
    """The whole of it, in pipeline order."""

    reader: ReaderConfig = ReaderConfig()
    retrieve: RetrieveConfig = RetrieveConfig()
    prompt: PromptConfig = PromptConfig()
    store: StoreConfig = StoreConfig()
    blend: BlendConfig = BlendConfig()
    decode: DecodeConfig = DecodeConfig()

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a YAML file. Raises ConfigError naming the file and the setting."""
        path = Path(path)
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path} is not YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"config file {path} must hold sections ({', '.join(cls.model_fields)}), not {values!r}"
            )
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"config file {path}: {error}") from None

    def to_yaml(self) -> str:
        """The effective settings, as `load` reads them."""
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        return text


AnySection = TypeVar("AnySection", bound=Section)


def changed(section: AnySection, **values: Any) -> AnySection:
    """The section with the values that are not None replaced, and checked again."""
    given = {name: value for name, value in values.items() if value is not None}
    return type(section)(**{**section.model_dump(), **given}) if given else section


def _explain(root: type[Section], error: ValidationError) -> str:
    """One line for a validation error's first problem."""
    problem = error.errors()[0]
    # Of a setting that takes several types, pydantic adds the type that it tried: no setting has such a name.
    tried = {"constrained-float", "float", "literal['auto']"}
    *parents, name = [str(part) for part in problem["loc"] if part not in tried] or ["?"]
    section = root.inside + root.__name__.removesuffix("Config").lower()
    where = ".".join([section, *parents, name] if section else [*parents, name])
    if problem["type"] == "extra_forbidden":
        known = _fields_at(root, parents)
        return f"unknown setting {where!r}: {nearest(name, known)}"
    return (
        f"setting {where!r} cannot be {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
    )


def _fields_at(root: type[BaseModel], parents: list[str]) -> list[str]:
    for parent in parents:
        field = root.model_fields.get(parent)
        if (
            field is None
            or not isinstance(field.annotation, type)
            or not issubclass(field.annotation, BaseModel)
        ):
            return []
        root = field.annotation
    return list(root.model_fields)
