"""What is wrong with a setting, in one line that names it and the nearest one that there is."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from blendserve.registry import nearest


def explained(root: type[BaseModel], inside: str, error: ValidationError) -> str:
    """One line for a validation error's first problem."""
    problem = error.errors()[0]
    # Of a setting that takes several types, pydantic adds the type that it tried: no setting has such a name.
    tried = {"constrained-float", "float", "literal['auto']"}
    *parents, name = [str(part) for part in problem["loc"] if part not in tried] or ["?"]
    section = inside + root.__name__.removesuffix("Config").lower()
    where = ".".join([section, *parents, name] if section else [*parents, name])
    if problem["type"] == "extra_forbidden":
        known = _fields_at(root, parents)
        return f"unknown setting {where!r}: {nearest(name, known)}"
    why = problem["msg"].removeprefix("Value error, ")
    return f"setting {where!r} cannot be {problem['input']!r}: {why[0].lower()}{why[1:]}"


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
