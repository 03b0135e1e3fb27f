"""Compare the benches of an older checkout with this one: runs in turns (A B B A), medians and ranges.

    python scripts/baseline.py CHECKOUT ttft "network --rates-gbit 1" --rounds 2

Each NAME is a bench of `blendserve bench` or `benchmarks`, with its options. A * marks figures whose ranges do not meet.
The machine must be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
TIMEOUT_S = 900


def medians(words: list[str], checkout: Path) -> dict[str, float]:
    """Run a bench of the package in `checkout` -> the median of every metric, by its labels."""
    is_own = (checkout / "benchmarks" / f"{words[0]}.py").exists()
    command = [
        sys.executable,
        "-m",
        *(["benchmarks"] if is_own else ["blendserve", "bench"]),
        *words,
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S
    )
    values: dict[str, list[float]] = {}
    for group in json.loads(done.stdout.splitlines()[-1])["groups"]:
        for labels, _, metrics in group["samples"]:
            row = " ".join(f"{name}={labels[name]}" for name in sorted(labels))
            for metric, value in metrics.items():
                values.setdefault(f"{row} {metric}", []).append(value)
    return {label: statistics.median(found) for label, found in values.items()}


def compare(name: str, old: list[dict[str, float]], new: list[dict[str, float]]) -> None:
    """Print new over old for every metric that both have."""
    print(f"{name}\n{'old':>10} {'new':>10} {'new/old':>8}")
    for label in sorted(set.intersection(*map(set, (*old, *new)))):
        before, after = ([run[label] for run in runs] for runs in (old, new))
        apart = "*" if min(after) > max(before) or max(after) < min(before) else " "
        a, b = statistics.median(before), statistics.median(after)
        print(f"{a:10.4g} {b:10.4g} {b / a if a else 0:8.3f} {apart} {label}")


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("benches", nargs="+")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    failed = False
    for name in options.benches:
        found: dict[Path, list[dict[str, float]]] = {options.checkout: [], HERE: []}
        try:
            for checkout in [options.checkout, HERE, HERE, options.checkout] * options.rounds:
                found[checkout].append(medians(name.split(), checkout))
            compare(name, found[options.checkout], found[HERE])
        except subprocess.SubprocessError as error:
            print(f"{name}: {error}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
