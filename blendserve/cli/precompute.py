"""`blendserve precompute`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from blendserve import console
from blendserve.cli.options import IndexArg, JsonOpt, Options, RayOpt, make_app, with_options
from blendserve.cli.show import as_dict
from blendserve.config import Config
from blendserve.errors import InputError
from blendserve.paths import index_folder

if TYPE_CHECKING:
    from blendserve.engine.engine import Engine

app = make_app()


@app.command()
@with_options(
    settings=Options(
        Config(), "reader.model", "store.path", "store.codec", load=Config.load, names={"store.path": "store"}
    )
)
def precompute(
    index: IndexArg,
    settings: Config,
    shard: Annotated[
        str, typer.Option(help="Do this share of the work, i/n with i from 0; a store may be shared.")
    ] = "0/1",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Compute by so many actors of a Ray cluster, each with a reader; without it, in this process.",
        ),
    ] = None,
    ray: RayOpt = None,
    json: JsonOpt = False,
) -> None:
    """Compute and store the KV of an index's chunks.

    What is stored already is left alone: stop it and start it again at any time. The exit code is 1 if a chunk is
    missing at the end. A store that does not know yet how this corpus's chunks move in company learns it then, from some
    of them; correction `prior` uses it.

    Over several processes or machines on one store, a file or a server: run the same command in each. A chunk that one is
    computing is left to it by the others, who come back to it at the end:

    \b
        blendserve precompute docs -c configs/precompute_worker.yaml      # here and there

    Over several machines, into a store each, which are merged afterwards:

    \b
        blendserve precompute docs --shard 0/2 --store kv-0      # here
        blendserve precompute docs --shard 1/2 --store kv-1      # there
        blendserve store merge docs kv-0 kv-1

    Over the GPUs of one machine, into one store:

    \b
        CUDA_VISIBLE_DEVICES=0 blendserve precompute docs &
        CUDA_VISIBLE_DEVICES=1 blendserve precompute docs &
        wait

    Over the machines of a Ray cluster, or the GPUs or cores of this one, by actors into one store that all of them reach
    (docs/how-to/ray-cluster.md). An actor or machine that dies loses no stored chunk:

    \b
        blendserve precompute docs -c configs/precompute_worker.yaml --workers 4
        blendserve precompute docs -c configs/precompute_worker.yaml --workers 4 --ray auto
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds

    part = _shard(shard)
    if ray and not workers:
        raise InputError("--ray says where workers run: give --workers, too")
    if workers and part != (0, 1):
        raise InputError(
            "--shard is for processes that know nothing of each other: leave it out with --workers"
        )
    with Engine.open(index, settings, console.say) as engine:
        per_token = engine.reader.adapter.kv_bytes_per_token
        try:
            with console.progress_twice(
                "Precomputing", "Learning how chunks move", ("tokens", "tokens"), per_token
            ) as bars:
                if workers:
                    from blendserve.workers.precompute import precompute_index

                    report = precompute_index(engine, index_folder(index), workers, ray, *bars)
                else:
                    report = engine.precompute(None, part, *bars)
        except KeyboardInterrupt:
            console.say("stopped: what was computed is stored; the same command goes on from there")
            raise typer.Exit(130) from None
        console.say(learnt(engine))
        missing = engine.missing(shard=part)
        rate = report.tokens / report.seconds if report.seconds else 0.0
        if json:
            console.print_json({**as_dict(report), "tokens_per_second": round(rate, 1), "missing": missing})
        else:
            console.out.print(
                f"{report.chunks} chunks: {report.computed} computed ({report.tokens:,} tokens, {rate:,.0f} tokens/s, "
                f"{report.bytes / 1e6:,.0f} MB), {report.skipped} there already, {missing} missing"
            )
        if missing:
            raise typer.Exit(1)


def learnt(engine: Engine) -> str:
    """What the store knows of how the corpus's chunks move."""
    if (priors := engine.blender.known.current()) is None:
        return "how chunks move in company is not known: the corpus is too small, or no correction uses it"
    keys, values = priors.explained
    return (
        f"of how chunks move in company {keys:.0%} (keys) and {values:.0%} (values) is known beforehand, as a share of "
        "the variance"
    )


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit()):
        raise InputError(f"shard {text!r} is not i/n: give for example 0/2 on one machine and 1/2 on another")
    return int(part), int(parts)
