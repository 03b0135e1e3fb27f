"""`blendserve serve` and `blendserve keys ...`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.options import MANY, RayOpt, make_app, option, single_command, with_options, with_settings
from blendserve.config import Config
from blendserve.console import Output
from blendserve.errors import InputError
from blendserve.paths import check_output

log = logging.getLogger(__name__)
KEYS = Path("keys.json")
FileOpt = Annotated[Path, typer.Option("--file", help="Key file, as given to `serve --keys`.")]
OwnerArg = Annotated[str, typer.Argument(help="Name of the key's owner; each name has one key.")]
keys = make_app("Create, list and revoke API keys of the server.")


@single_command
@with_settings(
    *("model.name", "serve.served_model_name", "blend.method", "blend.near", "prompt.separator"),
    *("serve.host", "serve.port", "serve.keys", "serve.api_key", "serve.cors_origins", "serve.slots"),
    *("serve.slot_tokens", "serve.max_concurrent", "serve.drain_s", "serve.log_text"),
)
def serve(
    settings: Config,
    index: list[str] | None = option(
        None,
        "Index to serve: a folder, a name in indexes/, or a published collection such as kdn:https://HOST/NAME. "
        "Repeatable: the server then has several collections, in the store of the first. [default: "
        "indexes/demo]",
        "--index",
        "-i",
        metavar=MANY,
    ),
    no_index: bool = option(
        False,
        "Serve without an index, for clients that send complete prompts. Stored text in a prompt is reused. Set "
        "`store.location` to keep the store across restarts.",
        "--no-index",
    ),
    replicas: str | None = option(
        None,
        "Number of Ray replicas, or a range in which Ray Serve scales them. [default: one engine in this process]",
        metavar="N|MIN-MAX",
    ),
    ray: RayOpt = None,
    print_config: bool = option(False, "Print all settings as YAML and exit.", "--print-config"),
) -> None:
    """Serve indexes over an HTTP API that OpenAI clients can use.

    A request can override these options. --config also reads the server's own section, `serve`.

    With --replicas, this process retrieves passages and handles HTTP. Engines on a Ray cluster run the model and share
    one store. A request goes to the replica with most of its chunks in memory, unless that replica is overloaded:

    \b
        blendserve serve -i docs -c configs/cluster.yaml --replicas 2
        blendserve serve -i docs -c configs/cluster.yaml --replicas 1-4      # Ray Serve scales between 1 and 4
    """
    if print_config:
        console.out.print(settings.to_yaml(), markup=False, end="")
        return
    indexes = [] if no_index else index or ["indexes/demo"]
    if no_index and (index or replicas):
        raise InputError(f"--no-index cannot be combined with {'--index' if index else '--replicas'}")
    if ray and not replicas:
        raise InputError("--ray is the cluster for --replicas: give --replicas, too")
    settings = settings.with_environment_key()
    from blendserve.serve import server  # not at the top: it imports torch and FastAPI

    log.info(
        "Indexes: %s\n%s",
        ", ".join(indexes) or "none",
        settings.to_yaml(changes=True) or "Settings: the defaults",
    )
    if replicas is not None:
        from blendserve.ray.ingress import serve_cluster
        from blendserve.ray.replicas import ReplicaCount

        serve_cluster(settings, indexes, ReplicaCount.parse(replicas), ray)
    else:
        server.serve(settings, indexes)


@keys.command()
@with_options()
def create(
    name: OwnerArg,
    file: FileOpt = KEYS,
    namespace: str | None = option(
        None, "Namespace of the KV cache; keys of other namespaces cannot read it. [default: NAME]"
    ),
    collection: list[str] | None = option(
        None, "Collection that the key may use. Repeatable. [default: all collections]", metavar=MANY
    ),
    tag: list[str] | None = option(
        None,
        "Tag of documents that the key may read, by their metadata field `tags`. Repeatable. It can change none. "
        "[default: all documents]",
        metavar=MANY,
    ),
    read_only: bool = option(False, "Forbid changes of documents, pins and stored KV.", "--read-only"),
    admin: bool = option(
        False, "Allow /metrics and other admin routes, and pins without a quota.", "--admin"
    ),
    max_concurrent: int | None = option(None, "Limit of concurrent requests. [default: the server's]", min=1),
    max_per_minute: int | None = option(None, "Limit of requests per minute. [default: the server's]", min=1),
) -> Output:
    """Create a key and print it once.

    The file stores only the key's hash.
    """
    check_output(file)
    from blendserve.serve.keys import KeyFile, Tenant

    tenant = Tenant(
        name=name,
        namespace=name if namespace is None else namespace,
        collections=tuple(collection) if collection else None,
        read_only=read_only,
        admin=admin,
        max_concurrent=max_concurrent,
        max_per_minute=max_per_minute,
        tags=tuple(tag) if tag else None,
    )
    key = KeyFile(file).create(tenant)
    return Output({"name": name, "key": key}, key)


@keys.command("list")
@with_options()
def list_keys(file: FileOpt = KEYS) -> Output:
    """List the owners of keys and their rights."""
    from blendserve.serve.keys import KeyFile

    found = [
        {
            "name": tenant.name,
            "namespace": tenant.namespace,
            "collections": tenant.collections,
            "tags": tenant.tags,
            "rights": [word for word, on in (("read-only", tenant.read_only), ("admin", tenant.admin)) if on],
        }
        for tenant in KeyFile(file).read().values()
    ]
    columns = ("name", "namespace", "collections", "tags", "rights")
    return console.listing("keys", found, str(file), columns, none="all")


@keys.command()
def revoke(name: OwnerArg, file: FileOpt = KEYS) -> None:
    """Revoke a key. A running server refuses it at once."""
    check_output(file)
    from blendserve.serve.keys import KeyFile

    KeyFile(file).revoke(name)
