"""Run the benches that every later change is held against, and keep what each printed.

    python scripts/baseline.py                         all, into docs/research/baseline/NAME.json
    python scripts/baseline.py ttft store --folder F   some, elsewhere
    python scripts/baseline.py ttft --against OLD --rounds 2
                                                       OLD's checkout and this one in turns (A B B A), medians and ranges

A file has the command, the seconds it ran, and the bench's own JSON, which names commit, machine and versions. A bench
that fails or runs too long is reported, the others go on. The machine must be idle.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCHES: dict[str, str] = {  # options: the shortest run whose medians hold still
    "ttft": "--methods deviation,query,query+prior --memory",
    "decode": "",
    "precompute": "",
    "store": "",
    "codec": "--codecs raw,int8,cachegen@1,predict@1,predict@3 --fit-tokens 4096 --repeats 3",
    "near": "",
    "embed": "",
    "start": "",
    "auto": "",
    "delivery": "",
    "link": "--round-trips-ms 5 --rates-gbit 0.1,1,10 --fit-tokens 2048",
    "faults": "--requests 30",
    "sharing": "--questions 10",
    "hostile": "--rounds 2 --seconds 15",
    "serving": "--shares 1,2 --seconds 15 --minutes 8 --out {scratch}/serving",
    "crowded": "--ours-alone",
}
TIMES = ("_s", "_ms", "seconds", "ttft", "prefill", "median")  # keys whose numbers are compared


def run(name: str, checkout: Path, scratch: Path, timeout_s: float) -> dict[str, Any]:
    """One bench of the package in `checkout`. Raises RuntimeError with the end of what it said."""
    options = BENCHES[name].format(scratch=scratch).split()
    quiet = [] if name == "serving" else ["--json"]
    command = [sys.executable, "-m", "blendserve", "bench", name, *options, *quiet]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not finished in {timeout_s:.0f} s") from None
    elapsed_s = time.monotonic() - began
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            shown = " ".join(["blendserve bench", name, *BENCHES[name].split(), *quiet])
            return {
                "command": shown,
                "exit_code": done.returncode,
                "elapsed_s": round(elapsed_s, 1),
                "result": json.loads(line),
            }
    raise RuntimeError(f"exit code {done.returncode}: {(done.stderr or done.stdout)[-500:]}")


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, by its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, f"{path}[{index}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def compare(name: str, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    """Print new over old for every time that both have, with the range of each; a * where the ranges do not meet."""
    table = [[dict(numbers(run["result"])) for run in runs] for runs in (old, new)]
    shared = set.intersection(*(set(run) for runs in table for run in runs))
    print(f"{name}: {len(old)} runs each\n{'':60} {'old':>10} {'new':>10} {'new/old':>8}")
    for path in sorted(p for p in shared if "[" not in p and any(p.endswith(t) for t in TIMES)):
        before, after = ([run[path] for run in runs] for runs in table)
        if not all(before + after):
            continue
        apart = min(after) > max(before) or max(after) < min(before)
        medians = statistics.median(before), statistics.median(after)
        print(f"{path:60} {medians[0]:10.4g} {medians[1]:10.4g} {medians[1] / medians[0]:8.3f} {'*' * apart}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--folder", type=Path, default=Path("docs/research/baseline"))
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another commit's checkout")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of A B B A")
    parser.add_argument("--timeout-s", type=float, default=900)
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHES):
        parser.error(f"unknown: {', '.join(unknown)}")
    here = Path(__file__).parents[1]
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    scratch = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    for name in options.names or BENCHES:
        order = [options.against, here, here, options.against] * options.rounds if options.against else [here]
        runs: dict[Path, list[dict[str, Any]]] = {}
        try:
            for checkout in order:
                runs.setdefault(checkout, []).append(run(name, checkout, scratch, options.timeout_s))
        except RuntimeError as error:
            print(f"{name}: failed: {error}", flush=True)
            failed += 1
            continue
        if options.against:
            compare(name, runs[options.against], runs[here])
        else:
            (options.folder / f"{name}.json").write_text(json.dumps(runs[here][0], indent=1) + "\n", "utf-8")
            print(
                f"{name}: {runs[here][0]['elapsed_s']} s, exit code {runs[here][0]['exit_code']}", flush=True
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
