"""The import graph: a package imports from the layers below it, and no private name crosses a border."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blendserve import registry
from blendserve.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
BASE = (
    "answer core errors kv extras config registry timing console paths provenance threads forks machine cpu_cap "
    "routing"
)
LAYERS = [  # from the ground up; of one layer, packages do not import each other both ways
    *(
        BASE,
        "kernels readers",
        "store",
        "models",
        "retrieve",
        "fetch",
        "blend",
        "quality",
        "engine",
        "kdn",
        "serve",
        "ray",
    ),
    *("evaluate bench", "simulate cost", "cli demo __main__"),
]
LAYER = {name: n for n, names in enumerate(LAYERS) for name in names.split()}
REGISTRIES = [COMMANDS, *(value for value in vars(registry).values() if isinstance(value, registry.Registry))]
Imports = set[tuple[str, str, str]]  # importing package, imported package, name
FILES = sorted((ROOT / "blendserve").rglob("*.py"))


def names(file: Path) -> Iterator[str]:
    """What a file imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def wrong(found: Imports) -> list[str]:
    """Imports upwards, both ways within a layer, and of private names."""
    pairs = {(a, b) for a, b, _ in found}
    upwards = [f"{a} -> {b}" for a, b in pairs if LAYER[a] < LAYER[b]]
    mutual = [f"{a} <-> {b}" for a, b in pairs if 0 < LAYER[a] == LAYER[b] and (b, a) in pairs]
    return [*upwards, *mutual, *(f"{a} -> {b}.{name}" for a, b, name in found if name.startswith("_"))]


def test_packages_import_public_names_of_lower_layers() -> None:
    found: Imports = set()
    for file in FILES:
        importing = file.relative_to(ROOT).with_suffix("").parts[1]
        for parts in (name.split(".") for name in names(file) if name.startswith("blendserve.")):
            if parts[1] in LAYER and importing not in ("__init__", parts[1]):
                found.add((importing, parts[1], parts[-1]))
    assert len({(a, b) for a, b, _ in found}) > 50
    assert wrong(found) == []
    both = {("bench", "evaluate", "x"), ("evaluate", "bench", "x")}
    for more in ({("models", "serve", "x")}, {("store", "kernels", "_x")}, both):
        assert wrong(found | more)


def test_a_store_loads_no_kernels_and_no_models() -> None:
    loaded = "import blendserve.store, sys; print(*(m for m in sys.modules if m.startswith('blendserve.')))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    packages = {name.split(".")[1] for name in done.stdout.split()}
    assert "store" in packages
    assert not packages & {"kernels", "models"}


def test_the_package_needs_no_checkout() -> None:
    """benchmarks/, scripts/ and tests/ are not installed."""
    found = {name.partition(".")[0] for file in FILES for name in names(file)}
    assert {"torch", "blendserve"} <= found
    assert not found & {"benchmarks", "scripts", "tests"}


@pytest.mark.parametrize("table", REGISTRIES, ids=lambda table: table.kind)
def test_every_entry_of_a_registry_can_be_imported(table: registry.Registry) -> None:
    for name in table.names:
        missing = "an optional package"
        try:
            table.load(name)
        except ImportError as error:
            missing = error.name or missing
        assert not missing.startswith("blendserve")
