"""Report what the rules for tests forbid (CONTRIBUTING.md): each finding would break a test when nothing is broken.

    python scripts/check_tests.py [PATH ...]

private   a private attribute or name of another object is read: test what a caller sees
prose     a message is asserted: compare the error's class and fields; tests/cli/test_errors.py alone reads messages
sleep     time.sleep: wait for a condition (`eventually`) or pass a `ManualClock`
import    a test module imports from another: what two share belongs in tests/support

A line that ends in `# allow: REASON` is left out. Exits with 1 if anything is found.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MESSAGES = {Path("tests/cli/test_errors.py")}  # the one table of what people read


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, rule, what was found) in one file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            yield line, "private", f".{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for name in node.names:
                if is_private(name.name) and module.startswith("blendserve"):
                    yield line, "private", f"import of {module}.{name.name}"
            if any(part.startswith("test_") for part in module.split(".")):
                yield line, "import", module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("blendserve.") and is_private(node.value.rsplit(".", 1)[1]):
                yield line, "private", node.value
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("time.sleep", "sleep"):
                yield line, "sleep", ast.unparse(node)
            if path not in MESSAGES and called.endswith("raises"):
                yield from ((line, "prose", ast.unparse(k.value)) for k in node.keywords if k.arg == "match")
            if path not in MESSAGES and called == "str" and ast.unparse(node).endswith(".value)"):
                yield line, "prose", ast.unparse(node)
            if called in ("setattr", "monkeypatch.setattr", "getattr", "patch.object"):
                for argument in node.args[1:2]:
                    if is_private(ast.unparse(argument).strip("'")):
                        yield line, "private", f"{called} of {ast.unparse(argument)}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(value: ast.expr) -> bool:
    """A test's own class may have private attributes."""
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def main(paths: list[str]) -> int:
    n_found = 0
    for path in map(Path, paths or ["tests"]):
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            lines = file.read_text("utf-8").splitlines()
            for line, rule, what in sorted(set(findings(file))):
                if "# allow: " not in lines[line - 1]:
                    print(f"{file}:{line}: {rule}: {what}")
                    n_found += 1
    print(f"{n_found} findings")
    return int(n_found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
