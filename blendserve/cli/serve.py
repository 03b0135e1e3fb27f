"""`blendserve serve`."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from blendserve.cli.options import Options, RayOpt, make_app, with_options
from blendserve.config import Config
from blendserve.errors import InputError

log = logging.getLogger(__name__)

app = make_app()


@app.command()
@with_options(
    settings=Options(
        Config(),
        "model.name",
        "serve.served_model_name",
        "blend.method",
        "blend.near",
        "prompt.separator",
        "serve.host",
        "serve.port",
        "serve.keys",
        "serve.api_key",
        "serve.cors_origins",
        "serve.slots",
        "serve.slot_tokens",
        "serve.queue",
        "serve.drain_s",
        "serve.log_text",
        load=Config.load,
    )
)
def serve(
    settings: Config,
    index: Annotated[
        list[str] | None,
        typer.Option(
            "--index",
            "-i",
            help="Index to serve: a folder, a name in indexes/, or a published collection, kdn:URL/NAME. Repeat it to "
            "serve several collections; they share the first one's store. [default: indexes/demo]",
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN-MAX",
            help="Number of engine replicas on a Ray cluster, or a range in which Ray Serve scales them. Without it, "
            "one engine runs in this process.",
        ),
    ] = None,
    ray: RayOpt = None,
) -> None:
    """Serve indexes over an HTTP API that OpenAI clients can use.

    Options are defaults: a request can override them. --config also reads the server's own section, `serve`.

    With --replicas, this process retrieves passages and handles HTTP, and engines on a Ray cluster run the model. They
    share one store. A request goes to the replica that has most of its chunks in memory, unless that replica is
    overloaded:

    \b
        blendserve serve -i docs -c configs/cluster.yaml --replicas 2
        blendserve serve -i docs -c configs/cluster.yaml --replicas 1-4      # Ray Serve scales between 1 and 4
    """
    indexes = index or ["indexes/demo"]
    if ray and not replicas:
        raise InputError("--ray is the cluster for --replicas: give --replicas, too")
    settings = settings.with_environment_key()
    from blendserve.serve import server  # not at the top: it imports torch and FastAPI

    log.info("Indexes: %s\n%s", ", ".join(indexes), settings.to_yaml())
    if replicas is not None:
        from blendserve.ray.ingress import serve_cluster
        from blendserve.ray.replicas import ReplicaCount

        serve_cluster(settings, indexes, ReplicaCount.parse(replicas), ray)
    else:
        server.serve(settings, indexes)
