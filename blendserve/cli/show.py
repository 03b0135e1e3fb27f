"""Results as text or as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from blendserve import console


def as_dict(report: Any) -> dict[str, Any]:
    """A dataclass as a dictionary of its fields."""
    return asdict(report)


def print_dict(values: dict[str, Any], json: bool) -> None:
    """A line for each value, or one JSON object."""
    if json:
        console.print_json(values)
        return
    width = max(map(len, values))
    for name, value in values.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        console.out.print(f"{name:<{width}}  {shown}", markup=False)
