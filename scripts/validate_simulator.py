"""The simulator against real engine processes on this machine: python scripts/validate_simulator.py.

A minute or some; nothing else should run meanwhile. The last line is one JSON object. With a reader of random weights
(--model random:configs/simulate/small_reader) requests take milliseconds, and a busy machine disturbs them less.
"""

from __future__ import annotations

import argparse

from blendserve import console
from blendserve.simulate.config import ROUTINGS
from blendserve.simulate.real import RUN_KINDS, RealConfig, compare
from blendserve.simulate.real_table import show


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the simulator with real engine processes.")
    parser.add_argument("--nodes", type=int, default=2, help="Start so many engine processes.")
    parser.add_argument("--requests", type=int, default=80, help="Ask so many requests in each run.")
    parser.add_argument("--model", default="smollm2-135m", help="Answer with this reader.")
    parser.add_argument(
        "--runs", default=RUN_KINDS, nargs="+", choices=RUN_KINDS, help="Make these runs alone."
    )
    parser.add_argument(
        "--routing", default=RealConfig().routing, nargs="+", choices=ROUTINGS, help="Route by these alone."
    )
    parser.add_argument("--json", action="store_true", help="Print the JSON object without the table.")
    asked = parser.parse_args()
    config = RealConfig(**{name: value for name, value in vars(asked).items() if name != "json"})
    figures = compare(config, console.say)
    if not asked.json:
        show(figures)
    console.print_json(figures)


if __name__ == "__main__":
    main()
