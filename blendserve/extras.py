"""The packages of an extra, for messages that ask the user to install them.

The package is on no index, so a message cannot say `pip install 'blendserve[valkey]'`; it names the packages instead.
"""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

NAME = "blendserve"


def install_hint(extra: str) -> str:
    """The pip command for an extra's packages on this platform, such as "pip install 'valkey>=6.0' 'libvalkey>=4.0'".

    Without metadata, or for an extra that they do not know, the hint names the extra.
    """
    chosen = [r for r in _requirements() if r.marker and _is_of(r, extra)]
    packages = " ".join(f"'{r.name}{_extras(r)}{r.specifier}'" for r in chosen)
    return f"pip install {packages}" if packages else f"install the extra {extra!r} of {NAME}"


def extra_with(module: str) -> str | None:
    """The extra whose packages have this top-level module, None if no extra has it."""
    extras = metadata.metadata(NAME).get_all("Provides-Extra") or () if _requirements() else ()
    named = [r for r in _requirements() if r.name == module and r.marker]
    return next((extra for extra in extras for r in named if _is_of(r, extra)), None)


def _requirements() -> list[Requirement]:
    """Those of the installed package; none if it runs without metadata."""
    try:
        return [Requirement(line) for line in metadata.requires(NAME) or ()]
    except metadata.PackageNotFoundError:
        return []


def _is_of(requirement: Requirement, extra: str) -> bool:
    """Whether the extra adds it here: its marker holds with the extra and not without."""
    marker = requirement.marker
    assert marker
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
