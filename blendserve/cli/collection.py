"""`blendserve collection ...`: publish, deliver, pin, prefetch and unpublish collections."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from blendserve import console
from blendserve.cli.options import MANY, IndexArg, make_app, option, with_options, with_settings
from blendserve.config import Config
from blendserve.console import Output
from blendserve.errors import ConfigError

if TYPE_CHECKING:
    from blendserve.kdn.catalog import CollectionCatalog

collection = make_app("Publish collections and deliver them to remote engines.")
NODE_KEY = "BLENDSERVE_NODE_KEY"
NameArg = Annotated[str, typer.Argument(help="Name of the collection.")]


@collection.command()
@with_settings(
    *("store.location", "deliver.host", "deliver.port", "deliver.keys"),
    "deliver.drain_s",
)
def serve(settings: Config) -> None:
    """Deliver the collections of a store over HTTP.

    All state is in the store, so any number of services can run on one store, behind any load balancer. API keys decide
    who may read which collection (`blendserve keys create NAME --collection ...`). --config also reads the service's
    section, `deliver`:

    \b
        blendserve collection serve -c configs/collection.yaml
    """
    from blendserve.serve.delivery import serve as run  # with torch: seconds

    run(settings)


@collection.command()
@with_settings("model.name", "store.location")
def publish(
    index: IndexArg,
    name: NameArg,
    settings: Config,
    level: list[str] | None = option(
        None,
        "Extra codec to store every chunk with, as name or name@level, for engines with slower links. "
        "Repeatable. It encodes what store.codec stores.",
        metavar=MANY,
    ),
) -> Output:
    """Publish an index as a collection.

    The command writes texts, vectors and KV to the store in the settings. It computes missing KV, together with every
    `blendserve precompute` on the same index and store. Publish again to update what changed:

    \b
        blendserve index build corpus.jsonl docs
        blendserve collection publish docs manual -c configs/collection.yaml --level predict@1 --level predict@3
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds
    from blendserve.kdn.catalog import summary
    from blendserve.kdn.publish import publish as run

    with Engine.open(index, settings) as engine:
        per_token = engine.model.decoder.kv_bytes_per_token
        with (
            console.progress("Precomputing", "tokens", per_token) as computed,
            console.progress("Sampling text from the model", "tokens") as sampled,
            console.progress("Fitting tables", "steps") as fitted,
            console.progress("Encoding", "chunks") as encoded,
        ):
            made = run(engine, name, level or (), computed, encoded, sampled, fitted)
    text = (
        f"published {made.name}: {made.chunks} chunks, {made.tokens:,} tokens, {made.n_bytes / 1e6:,.0f} MB at "
        f"{', '.join(made.levels)}; next: blendserve collection serve"
    )
    return Output(summary(made), text)


@collection.command("list")
@with_settings("store.location")
def list_collections(settings: Config) -> Output:
    """List the collections in a store."""
    from blendserve.kdn.catalog import summary  # with torch: seconds

    with open_catalog(settings) as catalog:
        found = [summary(collection) for collection in catalog.collections().values()]
    fields = ("name", "chunks", "tokens", "levels", "pinned", "published")
    columns = (*fields, "model=reader", "stored bytes=n_bytes")
    return console.listing("collections", found, "collections", columns)


@collection.command()
@with_settings("store.location")
def pin(name: NameArg, settings: Config) -> Output:
    """Protect a collection's chunks from eviction."""
    return _set_pins(name, settings, True)


@collection.command()
@with_settings("store.location")
def unpin(name: NameArg, settings: Config) -> Output:
    """Allow eviction of a collection's chunks.

    Chunks of other pinned collections stay pinned.
    """
    return _set_pins(name, settings, False)


def _set_pins(name: str, settings: Config, pinned: bool) -> Output:
    from blendserve.kdn.publish import set_pins  # with torch: seconds

    with open_catalog(settings) as catalog:
        n = set_pins(catalog, name, pinned)
    done = "pinned" if pinned else "unpinned"
    return Output({"collection": name, done: n}, f"{name}: {n} chunks {done}")


@collection.command("unpublish")
@with_settings("store.location")
def unpublish(
    name: NameArg,
    settings: Config,
    delete: bool = option(False, "Delete its chunks at once, except those of other collections.", "--delete"),
) -> Output:
    """Unpublish a collection.

    Services stop delivering it within seconds, and its chunks can be evicted.
    """
    from blendserve.kdn.publish import unpublish as run  # with torch: seconds

    with open_catalog(settings) as catalog:
        n = run(catalog, name, delete)
    done = "deleted" if delete else "unpinned"
    return Output({"collection": name, done: n}, f"unpublished {name}: {n} chunks {done}")


@collection.command("prefetch")
@with_options()
def prefetch(
    name: NameArg,
    node: Annotated[
        list[str],
        typer.Option(
            metavar="URL...", help="URL of an engine (`blendserve serve`) to prefetch into. Repeatable."
        ),
    ],
) -> Output:
    """Prefetch a collection's KV into the stores of engines.

    The engines must serve the collection (`-i URL`) and have a store of their own. If they have API keys, the
    key is read from BLENDSERVE_NODE_KEY. The exit code is 1 if an engine rejects the request.
    """
    import httpx  # start-up

    key = os.environ.get(NODE_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    results: dict[str, dict[str, str]] = {}
    for url in node:
        try:
            reply = httpx.post(
                f"{url.rstrip('/')}/v1/cache/fetch", json={"collection": name}, headers=headers
            )
            is_started = reply.status_code == 202
            results[url] = {"job": reply.json()["id"]} if is_started else {"error": reply.text}
        except (httpx.HTTPError, ValueError) as error:
            results[url] = {"error": f"no server responds ({error}): start one with `blendserve serve`"}
    lines = [f"{url}: {r.get('error') or 'fetching, job ' + r['job']}" for url, r in results.items()]
    return Output(results, "\n".join(lines), int(any("error" in result for result in results.values())))


@collection.command()
@with_settings("store.namespace")
def pull(
    source: Annotated[str, typer.Argument(help="URL of the collection, such as http://HOST:8010/NAME.")],
    folder: Annotated[str, typer.Argument(help="Folder for the index, or its name in indexes/.")],
    settings: Config,
) -> Output:
    """Fetch a collection's index, without KV, into a folder.

    Commands with `-i URL` do the same into the user's cache. If the service has API keys, the key is read
    from BLENDSERVE_COLLECTION_KEY.
    """
    from blendserve.kdn.pull import location_of
    from blendserve.kdn.pull import pull as run  # with torch: seconds
    from blendserve.paths import check_output_folder, index_folder

    into = check_output_folder(index_folder(folder))
    place = settings.store.replace("location", location_of(source))
    found = run(place.kdn, into, settings.store.namespace)
    return Output({"index": str(found)}, f"{found}: next: blendserve ask ... -i {source}")


@contextmanager
def open_catalog(settings: Config) -> Iterator[CollectionCatalog]:
    """The collections of a store. Raises ConfigError, StoreError."""
    if not settings.store.location:
        raise ConfigError(
            "the store of the collections is not set: give --store, such as indexes/NAME/kv, or a file with --config",
            setting="store.location",
        )
    from blendserve.fetch import open_store
    from blendserve.kdn.catalog import CollectionCatalog

    with open_store(settings.store, None, persistent=True) as store:
        yield CollectionCatalog(store)
