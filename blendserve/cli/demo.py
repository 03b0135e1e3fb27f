"""`blendserve demo`."""

from __future__ import annotations

from pathlib import Path

from blendserve.cli.options import IndexOpt, make_app

app = make_app()


@app.command()
def demo(index: IndexOpt = "indexes/demo") -> None:
    """Build a small index, ask it, and compare the methods.

    The index is of Python's language reference. Its KV is precomputed, three questions are answered, and one prompt is
    prefilled by every method, for a table of times and answers.
    """
    from blendserve.demo import run  # torch and all the rest: seconds

    run(Path(index))
