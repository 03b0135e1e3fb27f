"""Names of the program: what its pages, help texts and messages may put in back-ticks.

`unknown(text)` returns the back-ticked names that have the form of a setting, route, metric, command, option, method
string, header, environment variable, report field or class, and that the program does not have.
"""

from __future__ import annotations

import ast
import functools
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from blendserve.answer import Answer, Timings
from blendserve.cli.app import app
from blendserve.config import Config, Settings
from blendserve.core import BlendReport, QualityReport
from blendserve.cost import CostConfig
from blendserve.engine.engine import Engine
from blendserve.errors import BlendserveError
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.methods import parse_methods
from blendserve.registry import parse_codec
from blendserve.serve import app as routes
from blendserve.serve import (
    cache,
    delivery,
    documents,
    embeddings,
    messages,
    openai,
    openai_responses,
    rag,
    tokens,
)
from blendserve.serve.message_schemas import OutputConfig
from blendserve.serve.metrics import Metrics
from blendserve.serve.schemas import BlendOptions
from blendserve.simulate.config import SimulateConfig
from blendserve.store import MemoryStore
from tests.support.commands import walk

ROOT = Path(__file__).parents[2]
FOREIGN = frozenset(  # names of other programs, by program
    [
        *("--no-deps", "--index-url", "--no-build-isolation", "--cpuset-cpus", "--cache-reuse", "--merge"),
        *("--head", "--address", "--generate", "--kv-transfer-config"),  # Ray and vLLM
        "--fingerprint",  # blendserve-moq
        *("/data", "/data/cache", "/docs", "/redoc", "/v1"),  # a folder of the image; pages that are absent
        *("/none", "/primer"),  # ends of method strings
        *("/v1/responses", "guided_json", "output_config"),  # said to be missing
        *("model.forward", "meta.title", "tokenizer.ggml.pre", "index.as_query_engine", "pipeline.connect"),
        *(
            "logging.basicConfig",
            "vllm.entrypoints.openai.api_server",
            "cache.internal",
            "usage.input_tokens",
        ),
        *("DynamicCache", "ChatOpenAI", "OpenAIChatGenerator", "QuestionConfig", "LastPolicy", "OwnStore"),
        *("create_retrieval_chain", "create_stuff_documents_chain", "excluded_llm_metadata_keys"),
        *("inference_mode", "logits_to_keep", "page_content", "api_base_url", "response_metadata"),
        *("proxy_read_timeout", "client_max_body_size", "/etc/nginx/conf.d", "--cacert"),  # nginx and curl
        # systemd
        *(
            "TimeoutStopSec",
            "/etc/systemd/system",
            "/etc/blendserve.env",
            "/var/lib/blendserve/indexes",
        ),
        "/llm",  # an example of a prefix
        *("time.sleep", "n_c", "response.metadata", "blendserve serves as plain vLLM: ..."),
    ]
)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
FILES = re.compile(r"\.(?:json|jsonl|yaml|yml|py|cpp|h|md|txt|gguf|html|svg|sqlite|cfg|toml|sh|cu)$")
SECTIONS = "|".join(Config.model_fields)
PLACEHOLDER = re.compile(r"\{[^}]*\}|\b(?:NAME|HASH|KEY)\b")
OBJECTS: dict[str, type[Any]] = {
    "report": BlendReport,
    "timings": Timings,
    "engine": Engine,
    "answer": Answer,
}
JSON_FIELDS = {  # fields that responses add
    "text": {*openai_responses.TextConfig.model_fields},
    "output_config": {*OutputConfig.model_fields},
    "x_blendserve": {*BlendOptions.model_fields, "report", "ignored", "removed", "timings", "hint"},
    "usage": {"prompt_tokens_details", "cache_read_input_tokens", "input_tokens"},
}


def unknown(text: str) -> set[str]:
    """The names in a text that the program does not have."""
    fences = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    spans = {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))}
    lines = set(re.findall(r"^(?: {4}| {10})(blendserve [^\n#|&;]+)", text, re.MULTILINE))
    lines |= set(re.findall(r"^(blendserve [^\n#|&;]+)", "\n".join(fences), re.MULTILINE))
    wrong = {found for pattern, has in ANYWHERE for found in re.findall(pattern, text) if not has(found)}
    for span in spans | lines:
        has = next((has for pattern, has in FORMS if re.match(pattern, span)), None)
        if has and not has(span):
            wrong.add(span)
    return wrong - FOREIGN


# What the program has


@functools.cache
def commands() -> dict[tuple[str, ...], Any]:
    """Every command that is not hidden, by its words."""
    root: Any = typer.main.get_command(app)
    return {words: command for words, command in walk(root) if not command.hidden}


@functools.cache
def options() -> frozenset[str]:
    """All long options of all commands."""
    known = (p for command in commands().values() for p in command.params)
    found = {o for p in known for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
    return frozenset(found) | {"--help", "--version"}


@functools.cache
def settings() -> frozenset[str]:
    """Dotted names of all sections and settings."""
    return frozenset(
        name for root in (Config, SimulateConfig, CostConfig, EvaluateConfig) for name in _paths(root)
    )


def _paths(section: type[Settings], above: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield above + name
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _paths(typing.cast("type[Settings]", kind), f"{above}{name}.")


@functools.cache
def metrics() -> frozenset[str]:
    """Names of metrics, without the ends that Prometheus adds."""
    server = Metrics()
    server.watch(lambda: (0, 0), 1, MemoryStore(1))
    return frozenset(family.name for family in server.registry.collect())


@functools.cache
def paths() -> frozenset[str]:
    """Paths of all routes of both services, with {} in the place of parameters."""
    modules = cache, delivery, documents, embeddings, messages, openai, openai_responses, rag, tokens
    routers = [*(module.router for module in modules), routes.operations, routes.page]
    found = [getattr(route, "path", "") for router in routers for route in router.routes]
    return frozenset(PLACEHOLDER.sub("{}", path) for path in [*found, "/openapi.json"])


@functools.cache
def words() -> frozenset[str]:
    """Identifiers of the code, and words of its strings; not of docstrings and comments."""
    found = set[str]()
    for folder in ("blendserve", "benchmarks", "integrations", "scripts", "tests"):
        for file in {*(ROOT / folder).rglob("*.py")} - {ROOT / "tests" / "test_names.py"}:
            found |= _words_of(ast.parse(file.read_text("utf-8")))
    others = ROOT / "Makefile", *ROOT.glob("benchmarks/*.yaml"), *ROOT.glob("configs/**/*.yaml")
    for other in others:
        found |= {word.lower() for word in re.findall(r"[\w-]+", other.read_text("utf-8"))}
    return frozenset(found)


def _words_of(tree: ast.Module) -> set[str]:
    found = set[str]()
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for name in ("id", "attr", "name", "arg"):
            if isinstance(value := getattr(node, name, None), str):
                found.add(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            found |= {word for text in re.findall(r"[\w-]+", node.value) for word in (text, text.lower())}
    return found


# Whether the program has a name


def _has_option(name: str) -> bool:
    return name in options()


def _has_metric(name: str) -> bool:
    if name.endswith("_"):  # the beginning of several
        return any(metric.startswith(name) for metric in metrics())
    return re.sub("_(total|bucket|sum|count)$", "", name) in metrics()


def _has_variable(name: str) -> bool:
    section, _, setting = name.removeprefix("BLENDSERVE__").lower().partition("__")
    return f"{section}.{setting}" in settings() if "__" in name else name in words()


def _has_command(line: str) -> bool:
    """Whether a line's words are a command, and its options those of the command."""
    given = line.split()
    found: tuple[str, ...] = ()
    for word in given[1:]:
        if (*found, word) not in commands():
            break
        found = (*found, word)
    command = commands()[found]
    rest = given[1 + len(found) :]
    if hasattr(command, "list_commands") and rest and not rest[0].startswith("-") and not rest[0].isupper():
        return False
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    return {word for word in given if re.fullmatch(r"--[a-z][a-z-]+", word)} <= known


def _has_short_command(line: str) -> bool:
    return _has_command(f"blendserve {line}")


def _has_path(span: str) -> bool:
    path = PLACEHOLDER.sub("{}", span.rpartition(" ")[2].partition("?")[0])
    if path.endswith("..."):
        return any(known.startswith(path.removesuffix("...")) for known in paths())
    return any(known.endswith(path) or known.startswith(f"{path}/") for known in paths())


def _has_dotted(span: str) -> bool:
    """A setting, with its value; else a file, a module, or an attribute of an object."""
    name, value = re.fullmatch(r"([\w.]+)(?:[:=] ?(.+)|.*)", span, re.DOTALL).groups()  # type: ignore[union-attr]
    root, _, rest = name.partition(".")
    if name in FOREIGN or FILES.search(name):
        return True
    if root in Config.model_fields:
        return name in settings() and (value is None or _takes(name, value))
    if root in OBJECTS or root in JSON_FIELDS:
        return _has_attribute(root, rest)
    return name in settings() or any((ROOT / (name.replace(".", "/") + end)).exists() for end in (".py", ""))


def _takes(name: str, value: str) -> bool:
    try:
        Config.load(None, [f"{name}={value}"])
    except BlendserveError:
        return False
    return True


def _has_attribute(root: str, rest: str) -> bool:
    first, _, more = rest.partition(".")
    if root in JSON_FIELDS:
        return first in JSON_FIELDS[root] and (
            first not in OBJECTS or not more or _has_attribute(first, more)
        )
    owner = OBJECTS[root]
    if first == "quality" and more:
        return more in dir(QualityReport)
    return first in dir(owner)


def _has_word(span: str) -> bool:
    return span in words() or _has_metric(span) or _has_metric(f"blendserve_{span}")


def _has_header(name: str) -> bool:
    return name.lower() in words()


def _is_method(span: str) -> bool:
    for parse in (parse_codec, lambda word: parse_methods((word,), (0.15,), coded=True)):
        try:
            parse(span)
        except (ValueError, BlendserveError):
            continue
        return True
    return False


Has = Callable[[str], bool]
ANYWHERE: tuple[tuple[str, Has], ...] = (  # also in examples
    (r"(?<![\w-])--[a-z][\w-]+", _has_option),
    (r"(?<![\w/-])blendserve_[a-z_]+", _has_metric),
    (r"\bBLENDSERVE_[A-Z_]+", _has_variable),
    (r"\b[Xx]-[Bb]lendserve-[A-Za-z-]+", _has_header),
)
FORMS: tuple[tuple[str, Has], ...] = (  # of a text in back-ticks; the first that matches counts
    (r"blendserve [a-z]", _has_command),
    (
        rf"(?:{'demo|index|store|codec|keys|kdn|precompute|ask|doctor|evaluate|simulate'}) [a-z-]",
        _has_short_command,
    ),
    (r"(?:[A-Z]+ )?/[a-z][\w/{}.?=-]*$", _has_path),
    (r"[a-z_]+(?:\[[\d,]+\])?(?:\+[a-z]+)?@[\d.]+", _is_method),
    (r"[a-z_]\w*(?:\.[a-z_]\w*)+(?:$|[:=(\[ ])", _has_dotted),
    (r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+$", _has_word),
    (r"[A-Z][a-z]+(?:[A-Z]\w*)+$", _has_word),
)
