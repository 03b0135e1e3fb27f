"""Run the benches that every later change is held against, and compare two commits.

    python scripts/baseline.py                         all, into docs/research/baseline/NAME.json
    python scripts/baseline.py ttft store --folder F   some, elsewhere
    python scripts/baseline.py ttft --against OLD --rounds 2
                                                       OLD's checkout and this one in turns (A B B A), medians and ranges

A file has the command, the seconds it ran, and the bench's own JSON, which names commit, machine and versions. A bench
that fails or runs too long is reported, the others go on. The machine must be idle. A checkout of before the harness
prints other JSON under other names: FORMER says which of its figures is which of today's.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import re
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
    "near_duplicates": "",
    "embedding": "",
    "startup": "",
    "auto": "--repeats 3",
    "delivery": "",
    "network": "--round-trips-ms 5 --rates-gbit 0.1,1,10 --fit-tokens 2048",
    "sharing": "--questions 10",
    "noisy_neighbor": "--repeats 2 --seconds 15",
    "serving": "--load-factors 1,2 --seconds 15",
    "cpu_contention": "--no-libgomp",
}
CORE = ("ttft", "decode", "precompute", "store", "codec", "serving")  # the others are in benchmarks/
# Of a checkout of before the harness: its name of a bench, its options where they differ, and today's names of its
# figures: a pattern of a path in its JSON -> labels and metric.
FORMER: dict[str, tuple[str, str | None, dict[str, str]]] = {
    "ttft": ("ttft", None, {r"methods\.(.+)\.(ttft|prefill)\.median": r"method=\1 \2_s",
                            r"methods\.(.+)\.stages\.(\w+)\.seconds\.median": r"method=\1 \2_s",
                            r"memory\.(.+)\.peak_bytes": r"method=\1 peak_bytes"}),
    "decode": ("decode", None, {r"seconds_per_token\.(\w+)\.median": r"engine=\1 token_s"}),
    "precompute": ("precompute", None, {r"tokens_per_second\.(\w+)\.median": r"engine=\1 tokens_per_s"}),
    "store": ("store", None, {r"gigabytes_per_second\.(\w+)\.median": r"operation=\1 gb_per_s"}),
    "codec": ("codec", None, {r"codecs\.(.+)\.(encode|decode)\.seconds\.median": r"codec=\1 operation=\2 time_s",
                              r"codecs\.(.+)\.ttft\.median": r"codec=\1 operation=ttft time_s",
                              r"codecs\.(.+)\.bytes_per_token": r"codec=\1 bytes_per_token",
                              r"prefill\.median": "operation=prefill time_s"}),
    "near_duplicates": ("near", None, {r"methods\.(.+)\.ttft\.median": r"passages=\1 ttft_s"}),
    "embedding": ("embed", None, {r"passages_per_second\.(.+)\.median": r"library=\1 passages_per_s"}),
    "startup": ("start", None, {r"processes\.(.+)\.median": r"process=\1 time_s"}),
    "auto": ("auto", None, {}),
    "delivery": ("delivery", None, {r"cells\.(.+)\.contestants\.(.+)\.ttft\.median": r"client=\2 link=\1 ttft_s"}),
    "network": ("link", None, {r"cells\.(\S+) (\S+)\.codecs\.(.+)\.ttft\.median":
                               r"codec=\3 method=query+prior@0.15 rate_gbit=\2 round_trip_ms=\1 ttft_s",
                               r"cells\.(\S+) (\S+)\.computed\.median":
                               r"method=full rate_gbit=\2 round_trip_ms=\1 ttft_s"}),
    "sharing": ("sharing", None, {r"arrangements\.one cache for all\.ttft_mean": "cache=one shared ttft_mean_s",
                                  r"arrangements\.a cache per user\.ttft_mean": "cache=one per user ttft_mean_s"}),
    "noisy_neighbor": ("hostile", "--rounds 2 --seconds 15", {}),
    "serving": ("serving", "--shares 1,2 --seconds 15 --minutes 8 --out {scratch}/serving",
                {r"saturation_rps\.(\w+)": r"load=saturation method=\1 answered_per_s",
                 r"p95_ttft_at_full_saturation\.(\w+)": r"load=1.0 method=\1 ttft_p95_s"}),
    "cpu_contention": ("crowded", "--ours-alone", {}),
}  # fmt: skip
RENAMED = {
    "CacheGen's rule, our way": "CacheGen rule, pipelined",
    "CacheGen's": "CacheGen",
    "client=text": "client=recompute",
    "client=ours": "client=blendserve",
    "one edited, not looked for": "one edited, no search",
}


def run(name: str, checkout: Path, scratch: Path, timeout_s: float) -> dict[str, Any]:
    """One bench of the package in `checkout`. Raises RuntimeError with the end of what it printed."""
    options, words = BENCHES[name], ["blendserve", "bench"] if name in CORE else ["benchmarks"]
    if not (checkout / "benchmarks").is_dir():
        former, others, _ = FORMER[name]
        options, words, name = options if others is None else others, ["blendserve", "bench"], former
    quiet = [] if name == "serving" and "--out" in options else ["--json"]
    given = options.format(scratch=tempfile.mkdtemp(dir=scratch)).split()
    command = [sys.executable, "-m", *words, name, *given, *quiet]
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
            return {
                "command": " ".join([*words, name, *options.split(), *quiet]),
                "exit_code": done.returncode,
                "elapsed_s": round(elapsed_s, 1),
                "result": json.loads(line),
            }
    raise RuntimeError(f"exit code {done.returncode}: {(done.stderr or done.stdout)[-500:]}")


def metrics(name: str, result: dict[str, Any]) -> dict[str, float]:
    """The median of every metric, by its labels; a result of either form."""
    if "groups" not in result:
        return dict(_former(name, result))
    values: dict[str, list[float]] = {}
    fixed = {
        "context",
        "chunk",
        "source",
        "of",
        "chunks",
        "chunk_tokens",
        "new_tokens",
        "users",
        "engines",
        "edited",
    }
    for group in result["groups"]:
        for labels, _, found in group["samples"]:
            if labels.get("source", "warm") in (
                "warm",
                "fresh process",
            ):  # one point, as the benches above ask for
                shown = " ".join(f"{k}={labels[k]}" for k in sorted(labels.keys() - fixed))
                for metric, value in found.items():
                    values.setdefault(f"{shown} {metric}", []).append(value)
    return {label: statistics.median(found) for label, found in values.items()}


def _former(name: str, result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    patterns = FORMER[name][2]
    for path, value in _numbers(result):
        for pattern, label in patterns.items():
            if re.fullmatch(pattern, path):
                label = re.sub(pattern, label, path)
                for before, now in RENAMED.items():
                    label = label.replace(before, now)
                yield label, value


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested dictionaries, by its path; cells of a list are named by their link."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {
            cell.get("trace", f"{cell.get('round_trip_ms')} {cell.get('rate_gbit')}"): cell for cell in value
        }
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def compare(name: str, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    """Print new over old for every metric that both have, with the range of each; a * where the ranges do not meet."""
    table = [[metrics(name, run["result"]) for run in runs] for runs in (old, new)]
    shared = set.intersection(*(set(run) for runs in table for run in runs))
    print(f"{name}: {len(old)} runs each\n{'':60} {'old':>10} {'new':>10} {'new/old':>8}")
    for path in sorted(shared):
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
