"""What blending gives on a CUDA GPU: `blendserve bench gpu` as a script.

python scripts/bench_gpu.py --out runs/bench_gpu.json [--minutes 9]
python scripts/bench_gpu.py --rehearse            the same steps on a CPU with a toy, to see that they run
"""

import sys

from blendserve.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "gpu", *sys.argv[1:]]))
