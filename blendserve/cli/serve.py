"""`blendserve serve`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from blendserve import console
from blendserve.cli.options import Options, RayOpt, make_app, with_options
from blendserve.errors import ConfigError, InputError
from blendserve.serve.config import Config, effective, load_settings

app = make_app()


@app.command()
@with_options(
    settings=Options(
        Config(),
        "reader.model",
        "blend.method",
        "blend.near",
        "prompt.separator",
        "serve.host",
        "serve.port",
        "serve.keys",
        "serve.slots",
        "serve.slot_tokens",
        "serve.queue",
        "serve.drain_s",
        "serve.log_text",
        load=load_settings,
    )
)
def serve(
    settings: Config,
    index: Annotated[
        list[str] | None,
        typer.Option(
            "--index",
            "-i",
            help="Serve this index, a folder, a name in indexes/, or a published collection, kdn:URL/NAME. Given again, "
            "it serves more collections, with the first one's store. [default: indexes/demo]",
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|LEAST-MOST",
            help="Run so many replicas of the engine on a Ray cluster, or as many between two numbers as there is work "
            "for; without it, one in this process.",
        ),
    ] = None,
    ray: RayOpt = None,
) -> None:
    """Serve indexes over HTTP, to OpenAI's clients and others.

    Options hold where a request says nothing else. --config reads the server's own section, too (docs/serving.md).

    With --replicas, this process searches and answers over HTTP, and engines on a Ray cluster run the reader, behind one
    shared store. A request goes to the replica that has most of its chunks in memory, unless that one has too much to do
    (docs/cluster.md):

    \b
        blendserve serve -i docs -c configs/cluster.yaml --replicas 2
        blendserve serve -i docs -c configs/cluster.yaml --replicas 1-4      # Ray Serve adds and takes away
    """
    indexes = index or ["indexes/demo"]
    if ray and not replicas:
        raise InputError("--ray says where replicas run: give --replicas, too")
    running = _running()
    count = running.ReplicaCount.parse(replicas) if replicas is not None else None
    console.say(effective(settings, indexes))
    if count:
        running.serve_cluster(settings, indexes, count, ray, console.say)
    else:
        running.serve(settings, indexes, console.say)


def _running() -> Any:
    """The server's own imports, which are an extra. Raises ConfigError when they are not installed."""
    try:
        from blendserve.serve import running
    except ImportError as error:
        raise ConfigError(
            f"the server needs more packages: pip install 'blendserve[serve]' ({error})"
        ) from None
    return running
