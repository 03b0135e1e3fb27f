"""The import graph: a package imports from the layers below it, and no private name crosses a border."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from blendserve import registry
from blendserve.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
BASE = "core errors extras config registry timing console paths provenance threads cpu_cap routing"
LAYERS = [  # from the ground up; of one layer, packages do not import each other both ways
    *(BASE, "kernels", "models", "retrieve store", "fetch", "blend", "engine", "kdn", "serve", "ray"),
    *("evaluate bench", "simulate cost", "cli demo __main__"),
]
LAYER = {name: n for n, names in enumerate(LAYERS) for name in names.split()}
REGISTRIES = [COMMANDS, *(value for value in vars(registry).values() if isinstance(value, registry.Registry))]
Imports = set[tuple[str, str, str]]  # importing package, imported package, name


def imports() -> Imports:
    """Every import of the package's own modules, inside functions too."""
    found = set()
    for file in sorted((ROOT / "blendserve").rglob("*.py")):
        module = file.relative_to(ROOT).with_suffix("").parts
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            ours = [name.split(".") for name in names if name.startswith("blendserve.")]
            found |= {(module[1], name[1], name[-1]) for name in ours if module[1] != name[1]}
    return {(a, b, name) for a, b, name in found if a != "__init__" and b in LAYER}


def wrong(found: Imports) -> list[str]:
    """Imports upwards, both ways within a layer, and of private names."""
    pairs = {(a, b) for a, b, _ in found}
    upwards = [f"{a} -> {b}" for a, b in pairs if LAYER[a] < LAYER[b]]
    mutual = [f"{a} <-> {b}" for a, b in pairs if 0 < LAYER[a] == LAYER[b] and (b, a) in pairs]
    return [*upwards, *mutual, *(f"{a} -> {b}.{name}" for a, b, name in found if name.startswith("_"))]


def test_packages_import_public_names_of_lower_layers() -> None:
    found = imports()
    assert len({(a, b) for a, b, _ in found}) > 50
    assert wrong(found) == []
    both = {("bench", "evaluate", "x"), ("evaluate", "bench", "x")}
    for more in ({("models", "serve", "x")}, {("store", "kernels", "_x")}, both):
        assert wrong(found | more)


def test_the_package_needs_no_checkout() -> None:
    """benchmarks/, scripts/ and tests/ are not installed."""
    for file in (ROOT / "blendserve").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.split(".")[0] for name in names} & {"benchmarks", "scripts", "tests"}, file


@pytest.mark.parametrize("table", REGISTRIES, ids=lambda table: table.kind)
def test_every_entry_of_a_registry_can_be_imported(table: registry.Registry) -> None:
    for name in table.names:
        missing = "an optional package"
        try:
            table.load(name)
        except ImportError as error:
            missing = error.name or missing
        assert not missing.startswith("blendserve")
