"""Print branch coverage by package from `coverage json`, beside the baseline's; 1 if one fell by more than 0.5 points.

python scripts/coverage_by_package.py build/coverage.json docs/research/baseline/coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

LOSS = 0.5  # points; a package may lose no more


def by_package(report: Path) -> dict[str, float]:
    """Percentage of statements and branches that ran, by package of `blendserve`."""
    ran, there = Counter[str](), Counter[str]()
    for name, file in json.loads(report.read_text("utf-8"))["files"].items():
        parts = Path(name).parts[1:]
        package = parts[0] if len(parts) > 1 else "(top level)"
        summary = file["summary"]
        ran[package] += summary["covered_lines"] + summary["covered_branches"]
        there[package] += summary["num_statements"] + summary["num_branches"]
    percent = {name: round(100 * ran[name] / there[name], 2) for name in sorted(there) if there[name]}
    return {**percent, "all": round(100 * sum(ran.values()) / sum(there.values()), 2)}


def main(report: Path, baseline: Path) -> int:
    now, before = by_package(report), json.loads(baseline.read_text("utf-8"))
    fell = [name for name, percent in before.items() if now.get(name, percent) < percent - LOSS]
    print(f"{'package':14} {'percent':>7} {'before':>7}")
    for name, percent in now.items():
        print(f"{name:14} {percent:7.2f} {before.get(name, float('nan')):7.2f} {'fell' * (name in fell)}")
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
