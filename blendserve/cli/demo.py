"""`blendserve demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendserve.cli.options import IndexOpt, make_app

app = make_app()


@app.command()
def demo(
    index: IndexOpt = "indexes/demo",
    page: Annotated[
        bool,
        typer.Option(
            "--page",
            help="Serve the index with a web page instead of asking in the terminal. Ctrl-C stops it.",
        ),
    ] = False,
) -> None:
    """Build a small index, ask it, and compare the methods.

    The index holds Python's language reference. The questions are answered by full prefill and from precomputed KV,
    and each method prefills the same prompt. With --page, you ask in a web page instead.
    """
    from blendserve.demo import run, serve_page  # torch and all the rest: seconds

    (serve_page if page else run)(Path(index))
