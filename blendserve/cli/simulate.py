"""`blendserve simulate`: a simulated cluster under several routing methods."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.options import JsonOpt, Options, make_app, with_options
from blendserve.simulate.config import SimulateConfig

log = logging.getLogger(__name__)

app = make_app()

NAMES = {"requests.chunks": "request_chunks", "requests.number": "requests"}


@app.command()
@with_options(
    config=Options(
        SimulateConfig(),
        *("nodes", "routing", "seed", "requests.number", "requests.rate", "requests.chunks"),
        *("corpus.chunks", "corpus.zipf", "corpus.coherence", "corpus.lifetime", "tiers.memory_bytes"),
        *("links.store_rate", "compute.ratio"),
        load=SimulateConfig.load,
        names=NAMES,
    )
)
def simulate(
    config: SimulateConfig,
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Measure the compute times of this machine, write settings to this file, and exit."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="SVG file for a plot of TTFT and hit rate by number of nodes.")
    ] = None,
    valkey: Annotated[
        str | None, typer.Option(help="URL of a Valkey server for --measure; it measures fetching, too.")
    ] = None,
    json: JsonOpt = False,
) -> None:
    """Simulate a cluster under several routing methods.

    Nodes with cache tiers over a shared store, a corpus with Zipf popularity, and Poisson arrivals: hit rates by
    tier, TTFT, throughput and bytes moved. The files in configs/simulate hold the costs of a machine:

    \b
        blendserve simulate --nodes 1,2,4,8,16 --plot nodes.svg
        blendserve simulate -c configs/simulate/h100_8b.yaml --routing round_robin,chunks
        blendserve simulate -c configs/simulate/h100_8b.yaml --nodes 10000 --requests 1000000 --chunks 1000000000
        blendserve simulate --measure here.yaml && blendserve simulate -c here.yaml
    """
    if measure is not None:
        from blendserve.simulate.calibrate import calibrate  # torch: seconds

        links = "" if valkey else "; links are not measured without --valkey"
        log.info("Measuring (about half a minute)%s", links)
        measure.write_text(calibrate(config, valkey))
        log.info("wrote %s", measure)
        return
    from blendserve.simulate.metrics import show
    from blendserve.simulate.metrics import simulate as run  # torch: seconds

    with console.progress("Simulating", "requests") as update:
        figures = run(config, update)
    if json:
        console.print_json(figures)
    else:
        show(figures)
    if plot:
        from blendserve.simulate.plots import by_nodes  # matplotlib: a second

        plot.write_bytes(by_nodes(figures))
