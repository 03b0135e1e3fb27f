"""What blending gives on a CUDA GPU: is it right, how fast, and how far from what the machine can do.

    python scripts/bench_gpu.py --out runs/bench_gpu.json [--minutes 9]
    python scripts/bench_gpu.py --rehearse            the same steps on a CPU with a toy, to see that they run

One run, the most important steps first; what does not fit into the minutes is left out and named. JSON is written after
every step, a table printed last. Exit code 1 if a step failed or something did not agree, 2 without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from blendserve import console
from blendserve.errors import InputError


def main(
    out: Annotated[Path, typer.Option(help="The JSON file.")] = Path("runs/bench_gpu.json"),
    minutes: Annotated[float, typer.Option(help="Of the whole run, at most.")] = 9.0,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="On a CPU, small.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where stores are put meanwhile.")] = None,
) -> None:
    """Measure, and show."""
    from blendserve.bench.gpu.plan import real, rehearsal
    from blendserve.bench.gpu.run import Bench
    from blendserve.bench.gpu.tables import tables

    if not rehearse and not torch.cuda.is_available():
        raise InputError(
            "no CUDA GPU is to be seen here: run this on a machine with one (16-bit readers of 8B need 40 GB), and a "
            "torch built for CUDA; --rehearse tries the steps on a CPU"
        )
    plan = rehearsal() if rehearse else real(torch.device("cuda", torch.cuda.current_device()))
    bench = Bench(plan, minutes, out, folder, console.say)
    good = bench.go()
    for title, columns, rows in tables(bench.figures):
        console.table(title, columns, rows)
    console.out.print(f"figures in {out}", markup=False)
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    try:
        typer.run(main)
    except InputError as error:
        console.say(f"error: {error}")
        raise SystemExit(2) from None
