"""Quality and time to the first token of every method, side by side: `blendserve evaluate` as a script.

    python scripts/evaluate_2wikimqa.py                            # the generated set, needs nothing else
    python scripts/evaluate_2wikimqa.py --dataset 2wikimqa         # LongBench's 200 questions, from the hub
    python scripts/evaluate_2wikimqa.py --dataset questions.json --setting open --ratios 0.05,0.15

Resumable after any kill; docs/research/evaluation.md says what comes out.
"""

import sys

from blendserve.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
