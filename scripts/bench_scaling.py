"""How cost grows with context, ratio and chunk count, against the limit of this machine: `blendserve bench scaling`.

    python scripts/bench_scaling.py
    python scripts/bench_scaling.py --model random:Qwen2.5-0.5B --contexts 512,1024,3072 --plots runs/plots

Cells are kept in runs/bench_scaling/<model>/cells.jsonl as they are measured; the same command goes on from there. Draws
ttft_context.svg and ttft_ratio.svg into docs/pictures/. docs/research/benchmarks.md tells what the limit is.
"""

import sys

from blendserve.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "scaling", *sys.argv[1:]]))
