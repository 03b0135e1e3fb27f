"""`python -m tests.endurance`: every long run, one after the other. Exits with 1 if one failed.

Each run prints its figures; the verdicts are repeated at the end.
"""

from __future__ import annotations

import subprocess
import sys

RUNS = (
    "soak --model tiny --queries 300 --seconds 120",
    "soak_serving --requests 200 --clients 16",
    "crash --rounds 12 --seconds 90",
    "faults --requests 20",
)

if __name__ == "__main__":
    verdicts = {}
    for run in RUNS:
        print(f"python -m tests.endurance.{run}", flush=True)
        command = [sys.executable, "-m", *f"tests.endurance.{run}".split()]
        code = subprocess.run(command, check=False).returncode
        verdicts[run] = f"failed with {code}" if code else "passed"
        print(verdicts[run], flush=True)
    print(*(f"{verdict:14} {run}" for run, verdict in verdicts.items()), sep="\n")
    sys.exit(any(verdict != "passed" for verdict in verdicts.values()))
