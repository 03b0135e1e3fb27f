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
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to answer with: a bundled name, a folder or a Hugging Face id.", metavar="MODEL"
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Serve a web page over the index instead. Ctrl-C ends it.")
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            envvar="BLENDSERVE_DEMO_HOST",
            help="Address of the page's server, which asks for no API key.",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the page's server; 0 takes any free one.")] = 8000,
) -> None:
    """Ask about Python without and with a cache, and compare methods.

    The index holds Python's language reference. The questions are answered by full prefill and from precomputed KV,
    and each method prefills the same prompt. With --page, you ask in a web page instead.
    Another model needs an index folder of its own, or replaces the index.
    """
    from blendserve.config import Config
    from blendserve.demo import run, serve_page  # torch and all the rest: seconds

    model = model or Config().model.name
    if page:
        serve_page(Path(index), model, host, port)
    else:
        run(Path(index), model)
