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
            help="Serve the index with a page to ask it in, instead of asking here (extra: serve). Ctrl-C ends it.",
        ),
    ] = False,
) -> None:
    """Build a small index, ask it, and compare the methods.

    The index is of Python's language reference. Its KV is precomputed, three questions are answered, and one prompt is
    prefilled by every method, for a table of times and answers. With --page all that happens in a browser.
    """
    from blendserve.demo import run, serve_page  # torch and all the rest: seconds

    (serve_page if page else run)(Path(index))
