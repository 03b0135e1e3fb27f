"""What is chosen by name, one line each: the file and class behind a name, and which name is the default.

Nothing else in the package spells these names: settings, help texts and error messages read them here. A file is
imported when its name is first asked for. Installed packages add names through entry points of the registry's group.

A dataclass may have parameters, its fields with defaults but for those of metadata INTERNAL. A word gives them in
brackets after the name, as in `deviation[1,2]` or NAME[FIELD=VALUE,FIELD=VALUE]. Values without a field belong to the
first parameter.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

MANY = 12  # names that a message lists
INTERNAL = {"internal": True}  # metadata of a field that no word may give


class Registry:
    """Names of one kind of thing; the first is the default."""

    def __init__(
        self, kind: str, entries: Mapping[str, str], group: str = "", for_research: Collection[str] = ()
    ) -> None:
        """entries: name -> "module:attribute". group: of entry points with further ones; "" for none.

        for_research: names that measurements need and no user, so that no help offers them.
        """
        self.kind = kind
        self._entries = dict(entries)
        self._group = group
        self._for_research = frozenset(for_research)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def offered(self) -> tuple[str, ...]:
        """The names that a user chooses from."""
        return tuple(name for name in self._entries if name not in self._for_research)

    @property
    def default(self) -> str:
        return self.names[0]

    def check(self, name: str) -> str:
        """The name itself. Raises ValueError with the nearest known one."""
        if name not in self._entries and self._group:
            self._entries |= {found.name: found.value for found in entry_points(group=self._group)}
        if name not in self._entries:
            raise ValueError(f"there is no {self.kind} {name!r}: {nearest(name, list(self._entries))}")
        return name

    def target(self, name: str) -> str:
        """What is behind a name, "module:attribute"."""
        return self._entries[name]

    def load(self, word: str) -> Any:
        """The class behind the name of a word. Raises ValueError for an unknown one."""
        module, _, attribute = self._entries[self.check(word.partition("[")[0])].partition(":")
        return getattr(import_module(module), attribute)

    def parse(self, word: str) -> tuple[str, dict[str, Any]]:
        """Name of a word, and the parameters that differ from their defaults. Raises ValueError, telling what there is.

        The class is loaded only if the word has parameters.
        """
        name, bracket, text = word.partition("[")
        self.check(name)
        if not bracket:
            return name, {}
        if not text.endswith("]"):
            raise ValueError(f"the last character of {word!r} must be a closing bracket")
        known = parameters(self.load(name))
        if not known:
            raise ValueError(f"{self.kind} {name!r} has no parameters")
        field = next(iter(known))
        given: dict[str, list[str]] = {}
        for part in text[:-1].split(","):
            before, equals, value = part.rpartition("=")
            if equals:
                field = before.strip()
            given.setdefault(field, []).append(value.strip())
        for field in given:
            if field not in known:
                raise ValueError(
                    f"{self.kind} {name!r} has no parameter {field!r}: {nearest(field, list(known))}"
                )
        values = {field: known[field].read(given[field]) for field in known if field in given}
        return name, {field: value for field, value in values.items() if value != known[field].default}

    def word(self, word: str) -> str:
        """The shortest word that means the same. Raises ValueError."""
        name, values = self.parse(word)
        if not values:
            return name
        first = next(iter(parameters(self.load(name))))
        texts = [f"{field}={_written(value)}" for field, value in values.items()]
        return f"{name}[{','.join(texts).removeprefix(f'{first}=')}]"

    def make(self, word: str, **values: Any) -> Any:
        """The thing of a word, of these values for its other fields. Raises ValueError."""
        name, given = self.parse(word)
        return self.load(name)(**values, **given)

    def add(self, name: str, target: str) -> None:
        """One more, as a plug-in or a test does it."""
        self._entries[name] = target

    def remove(self, name: str) -> None:
        """Undo `add`."""
        del self._entries[name]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field that a word may give."""

    name: str
    kind: Any  # its type
    default: Any

    def read(self, texts: Sequence[str]) -> Any:
        """The value of these texts. Raises ValueError."""
        value = texts if get_origin(self.kind) is tuple else ",".join(texts)
        try:
            return TypeAdapter(self.kind).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ValueError(f"{self.name} cannot be {','.join(texts)!r}: {reason}") from None


def parameters(made: type) -> dict[str, Parameter]:
    """The parameters of a class, by name."""
    if not is_dataclass(made):
        return {}
    given = [field for field in fields(made) if field.init and "internal" not in field.metadata]
    known = [field for field in given if field.default is not MISSING]
    kinds = get_type_hints(made, include_extras=True) if known else {}
    return {field.name: Parameter(field.name, kinds[field.name], field.default) for field in known}


def _written(value: Any) -> str:
    """A parameter's value as a word has it."""
    values = value if isinstance(value, tuple) else (value,)
    return ",".join(str(part).removesuffix(".0") for part in values)


def nearest(name: str, known: list[str]) -> str:
    """A hint for a name that is not known: the one meant, else all of a few, the nearest of many."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if near:
        return f"did you mean {near[0]!r}?"
    if len(known) > MANY:
        return f"the nearest are {', '.join(difflib.get_close_matches(name, known, n=3, cutoff=0.0))}"
    return f"known are {', '.join(known)}"


POLICIES = Registry(
    "policy",
    {
        "query": "blendserve.blend.policies:QueryPolicy",
        "deviation": "blendserve.blend.policies:DeviationPolicy",
        "chunk_head": "blendserve.blend.policies:ChunkHeadPolicy",
        "random": "blendserve.blend.policies:RandomPolicy",
        "none": "blendserve.blend.policies:NonePolicy",
        "all": "blendserve.blend.policies:AllPolicy",
    },
    "blendserve.policies",
    for_research=("random", "none", "all"),
)
CORRECTIONS = Registry(
    "correction",
    {
        "prior": "blendserve.blend.corrections:PriorRidge",
        "ridge": "blendserve.blend.corrections:Ridge",
        "shift": "blendserve.blend.corrections:Shift",
        "none": "blendserve.blend.corrections:NoCorrection",
    },
    "blendserve.corrections",
    for_research=("ridge", "shift", "none"),
)

_CODE = (
    "py pyi js mjs jsx ts tsx java kt scala go rs swift dart zig c h cc cpp cxx hpp cu cs m rb php pl lua r jl hs ml ex "
    "sh bash ps1 sql proto css scss vue svelte yaml yml toml ini cfg"
)
CODE_SUFFIXES = tuple(_CODE.split())
READERS = Registry(  # by suffix; blendserve/readers/base.py has what a reader returns
    "file kind",
    {
        **dict.fromkeys(("txt", "text", "log", "rst", "adoc", "tex"), "blendserve.readers.text:read"),
        **dict.fromkeys(("md", "markdown"), "blendserve.readers.text:read_markdown"),
        **dict.fromkeys(("jsonl", "ndjson", "jsonl.gz", "json"), "blendserve.readers.records:read"),
        **dict.fromkeys(("csv", "tsv"), "blendserve.readers.tables:read_csv"),
        "pdf": "blendserve.readers.pdf:read",
        **dict.fromkeys(("html", "htm", "xhtml"), "blendserve.readers.web:read_html"),
        "epub": "blendserve.readers.web:read_epub",
        "docx": "blendserve.readers.office:read_docx",
        "pptx": "blendserve.readers.office:read_pptx",
        "xlsx": "blendserve.readers.office:read_xlsx",
        "eml": "blendserve.readers.mail:read",
        **dict.fromkeys(CODE_SUFFIXES, "blendserve.readers.text:read_code"),
    },
)
# group of entry points that name further ones, SUFFIX = MODULE:FUNCTION
READER_PLUGINS = "blendserve.readers"

# What full reuse is made of, and the baseline that everything is compared with: CacheBlend's rule (arXiv 2405.16444).
FULL_REUSE: dict[str, Any] = {"policy": "none", "correction": "none", "refine": 0.0}
CACHEBLEND = "deviation@0.15"
EVALUATED = (  # what `evaluate` compares unless told otherwise
    "random",
    "chunk_head",
    "deviation",
    "deviation+shift",
    "query",
    "query+shift",
    "query+ridge",
    "query+prior",
)
BENCHED = ("query+prior",)  # beside the baselines
STORES = Registry(
    "store kind",
    {
        "lmdb": "blendserve.store.lmdb:LMDBStore",
        "memory": "blendserve.store.memory:MemoryStore",
        "valkey": "blendserve.store.valkey:ValkeyStore",
        "kdn": "blendserve.fetch.kdn.source:KdnSource",
    },
    "blendserve.stores",
)
SHARED_STORE = "valkey"  # the kind that is a server
DELIVERED = "kdn"  # the kind whose chunks are files of a published collection
ADMISSIONS = Registry(
    "admission policy",
    {"tinylfu": "blendserve.store.policies:TinyLFU", "always": "blendserve.store.policies:Always"},
)
CODECS = Registry(
    "codec",
    {
        "raw": "blendserve.store.codecs.raw:Raw",
        "int8": "blendserve.store.codecs.int8:Int8",
        "predict": "blendserve.store.codecs.predict.codec:Predict",
        "cachegen": "blendserve.store.codecs.cachegen:CacheGen",
    },
    "blendserve.codecs",
)
PLAIN_CODECS = ("raw", "int8")  # those without tables
SENT_CODECS = (*PLAIN_CODECS, "predict@1")  # what KV is sent by over a network, the largest first
DELIVERED_CODECS = (*SENT_CODECS, "predict@3")  # levels that delivery is measured with


def parse_codec(word: str) -> tuple[str, int]:
    """Name and level of a codec that is written name or name@level. Raises ValueError, telling what there is.

    A codec is loaded only where a level has to be looked at, or a default one that is not 0.
    """
    name, at, level = word.partition("@")
    CODECS.check(name)
    if name == CODECS.default and not at:
        return name, 0
    try:
        made = CODECS.load(name)
    except ImportError as error:
        raise ValueError(str(error)) from None
    if not at:
        return name, made.default_level
    if not level.isdigit() or int(level) not in made.levels:
        known = ", ".join(f"{name}@{n}" for n in made.levels)
        raise ValueError(f"codec {name!r} has no level {level!r}: known are {known}")
    return name, int(level)


def codec_word(name: str, level: int) -> str:
    """The shortest word for a codec at a level."""
    return name if CODECS.load(name).levels == (level,) else f"{name}@{level}"


def every_codec() -> list[tuple[str, int]]:
    """Name and level of all that are installed here."""
    found = []
    for name in CODECS.names:
        try:
            found += [(name, level) for level in CODECS.load(name).levels]
        except ImportError:
            continue
    return found
