"""`blendserve precompute`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from blendserve import console
from blendserve.cli.options import IndexArg, JsonOpt, Options, RayOpt, make_app, with_options
from blendserve.cli.show import as_dict
from blendserve.config import Config
from blendserve.errors import InputError
from blendserve.paths import index_folder

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

app = make_app()


@app.command()
@with_options(
    settings=Options(
        Config(),
        "model.name",
        "store.location",
        "store.codec",
        load=Config.load,
    )
)
def precompute(
    index: IndexArg,
    settings: Config,
    shard: Annotated[
        str, typer.Option(help="Share of the work to do, i/n with i from 0; shards may use one store.")
    ] = "0/1",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of actors on a Ray cluster, each with a model; without it, this process computes.",
        ),
    ] = None,
    ray: RayOpt = None,
    json: JsonOpt = False,
) -> None:
    """Compute and store the KV of an index's chunks.

    Stored chunks are skipped, so the command can be stopped and run again at any time. Afterwards a correction
    prior is fitted on a sample of the chunks, if the store has none. The exit code is 1 if a chunk is missing at
    the end.

    Several processes or machines with one store (a file or a server): run the same command in each. A chunk that
    one process computes is leased to it; the others skip it and check it again at the end:

    \b
        blendserve precompute docs -c configs/precompute_worker.yaml      # on each machine

    Several machines with a store each, merged afterwards:

    \b
        blendserve precompute docs --shard 0/2 --store kv-0      # first machine
        blendserve precompute docs --shard 1/2 --store kv-1      # second machine
        blendserve store merge docs kv-0 kv-1

    The GPUs of one machine, into one store:

    \b
        CUDA_VISIBLE_DEVICES=0 blendserve precompute docs &
        CUDA_VISIBLE_DEVICES=1 blendserve precompute docs &
        wait

    The machines of a Ray cluster, or the GPUs or cores of this one: actors write to one store that all of them can
    reach (docs/how-to/ray-cluster.md). If an actor or machine dies, its stored chunks remain:

    \b
        blendserve precompute docs -c configs/precompute_worker.yaml --workers 4
        blendserve precompute docs -c configs/precompute_worker.yaml --workers 4 --ray auto
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds

    part = _shard(shard)
    if ray and not workers:
        raise InputError("--ray names the cluster of the workers: give --workers, too")
    if workers and part != (0, 1):
        raise InputError("--shard is for independent processes: leave it out with --workers")
    with Engine.open(index, settings) as engine:
        per_token = engine.reader.adapter.kv_bytes_per_token
        try:
            with console.progress_twice(
                "Precomputing", "Fitting the correction prior", ("tokens", "tokens"), per_token
            ) as bars:
                if workers:
                    from blendserve.ray.precompute import precompute_index

                    report = precompute_index(engine, index_folder(index), workers, ray, *bars)
                else:
                    report = engine.precompute(None, part, *bars)
        except KeyboardInterrupt:
            log.info("stopped: computed chunks are stored; run the same command to resume")
            raise typer.Exit(130) from None
        if engine.blender.priors.current() is None:
            log.info("no correction prior: the corpus is too small, or the correction uses none")
        missing = engine.missing(shard=part)
        rate = report.tokens / report.seconds if report.seconds else 0.0
        if json:
            console.print_json({**as_dict(report), "tokens_per_second": round(rate, 1), "missing": missing})
        else:
            console.out.print(
                f"{report.chunks} chunks: {report.computed} computed ({report.tokens:,} tokens, {rate:,.0f} tokens/s, "
                f"{report.bytes / 1e6:,.0f} MB), {report.skipped} already stored, {missing} missing"
            )
        if missing:
            raise typer.Exit(1)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit()):
        raise InputError(f"shard {text!r} is not i/n: give for example 0/2 on one machine and 1/2 on another")
    return int(part), int(parts)
