"""requirements/: what pip installs without looking for more is whole, hashed, and what setup.cfg asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[1] / "requirements"
FILES = ("serve", "dev", "optional")
ENTRY = re.compile(
    r"^(?P<pin>[^\s#].*?) \\\n(?P<hashes>(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)
EXTRAS = {"serve": [""], "dev": ["dev", "documents", "evaluate", "codecs", "valkey", "embedders"]}
EXTRAS["optional"] = ["integrations", "ray", "cloud", "moto"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SYSTEMS = (
    *(("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64")),
    *(("darwin", "Darwin", "arm64"), ("win32", "Windows", "AMD64")),
)


def locked(*files: str) -> dict[str, list[Requirement]]:
    """The pins of each package, one for each kind of machine."""
    found: dict[str, list[Requirement]] = {}
    for file in files:
        for entry in ENTRY.finditer((FOLDER / f"{file}.txt").read_text()):
            pin = Requirement(entry["pin"])
            found.setdefault(canonicalize_name(pin.name), []).append(pin)
    return found


def machines() -> Iterator[dict[str, str]]:
    for python, (platform, system, machine) in product(PYTHONS, SYSTEMS):
        yield {
            **{"python_version": python, "python_full_version": f"{python}.0", "sys_platform": platform},
            **{"platform_system": system, "platform_machine": machine, "implementation_name": "cpython"},
            **{
                "platform_python_implementation": "CPython",
                "os_name": "nt" if system == "Windows" else "posix",
            },
        }


def applies(requirement: Requirement, machine: dict[str, str], extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**machine, "extra": extra})


def needed(name: str, extras: set[str], seen: set[str]) -> Iterator[str]:
    """The packages that an installed one brings on this machine, as their metadata says."""
    try:
        lines = metadata.requires(name) or ()
    except metadata.PackageNotFoundError:  # optional, or locked for nothing: the name itself was yielded
        return
    for asked in map(Requirement, lines):
        wanted = canonicalize_name(asked.name)
        used = any(asked.marker is None or asked.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if used and f"{wanted}{asked.extras}" not in seen:
            seen.add(f"{wanted}{asked.extras}")
            yield wanted
            yield from needed(wanted, asked.extras, seen)


@pytest.mark.parametrize("file", FILES)
def test_a_file_has_pins_with_hashes_alone(file: str) -> None:
    text = (FOLDER / f"{file}.txt").read_text()
    assert ENTRY.sub("", text) == ""
    assert locked(file)


@pytest.mark.parametrize("file", FILES)
def test_a_kind_of_machine_has_one_release_that_setup_cfg_allows(file: str) -> None:
    pins = locked(*FILES[: FILES.index(file) + 1])
    asked = [Requirement(line) for line in metadata.requires("blendserve") or ()]
    for machine, extra in product(machines(), EXTRAS[file]):
        for one in (
            one for one in asked if canonicalize_name(one.name) != "torch" and applies(one, machine, extra)
        ):
            fits = [pin for pin in pins.get(canonicalize_name(one.name), []) if applies(pin, machine)]
            versions = [next(iter(pin.specifier)).version for pin in fits]
            assert [one.specifier.contains(version) for version in versions] == [True], (str(one), machine)


@pytest.mark.parametrize("file", FILES)
def test_the_files_have_what_their_packages_need_on_this_machine(file: str) -> None:
    """But the libraries that a CUDA build of torch brings."""
    files = FILES[: FILES.index(file) + 1]
    found = {*needed("blendserve", {extra for name in files for extra in EXTRAS[name]}, set())}
    pins = {name for name, pins in locked(*files).items() if any(applies(pin, {}) for pin in pins)}
    missing = found - pins - {"torch"}
    assert {name for name in missing if not re.match("nvidia-|cuda-|triton", name)} == set()
    assert {"sympy", "typing-extensions", "tokenizers"} <= found
