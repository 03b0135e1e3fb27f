"""`blendserve kdn ...`: publish, deliver, pin, prefetch and unpublish collections."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from blendserve import console
from blendserve.cli.options import IndexArg, JsonOpt, Options, make_app, with_options
from blendserve.cli.show import as_dict
from blendserve.config import Config

app = make_app("Publish collections and deliver them to remote engines.")

NODE_KEY = "BLENDSERVE_NODE_KEY"
NameArg = Annotated[str, typer.Argument(help="Name of the collection.")]
STORE = Options(Config(), "store.location", load=Config.load)


@app.command()
@with_options(
    settings=Options(
        Config(),
        "store.location",
        "deliver.host",
        "deliver.port",
        "deliver.keys",
        "deliver.memory_mb",
        "deliver.drain_s",
        load=Config.load,
    )
)
def serve(settings: Config) -> None:
    """Deliver the collections of a store over HTTP.

    All state is in the store: any number of these services can run on one, behind any load balancer. API keys
    decide who may read which collection (`blendserve keys create NAME --collection ...`). --config also reads the
    service's section, `deliver`:

    \b
        blendserve kdn serve -c configs/kdn.yaml
    """
    from blendserve.serve.delivery import serve as run  # with torch: seconds

    run(settings)


@app.command()
@with_options(
    settings=Options(
        Config(), "model.name", "store.location", load=Config.load, names={"store.location": "store"}
    )
)
def publish(
    index: IndexArg,
    name: NameArg,
    settings: Config,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="Further codec to store every chunk with, written name or name@level, for "
            "engines behind slower links. Repeatable; it codes what store.codec stores."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=0, help="Number of further processes that precompute until the collection is complete."
        ),
    ] = 0,
    json: JsonOpt = False,
) -> None:
    """Publish an index as a collection.

    Texts, vectors and KV go to the store in the settings. Missing KV is computed by this process, by its worker
    processes, and by every `blendserve precompute` on the same index and store. Publishing again updates what
    changed:

    \b
        blendserve index build corpus.jsonl docs
        blendserve kdn publish docs manual -c configs/kdn.yaml --level predict@1 --level predict@3
    """
    from blendserve.engine.engine import Engine
    from blendserve.kdn.publish import publish as run  # torch and all the rest: seconds

    with ExitStack() as stack:
        engine = stack.enter_context(Engine.open(index, settings))
        stack.enter_context(_workers(workers, index, settings))
        per_token = engine.reader.adapter.kv_bytes_per_token
        with console.progress("Precomputing", "tokens", per_token) as update:
            made = run(engine, name, level or (), update)
    if json:
        console.print_json(_summary(as_dict(made)))
    else:
        console.out.print(
            f"published {made.name}: {made.chunks} chunks, {made.tokens:,} tokens, {made.n_bytes / 1e6:,.0f} MB at "
            f"{', '.join(made.levels)}; next: blendserve kdn serve",
            markup=False,
        )


@app.command("list")
@with_options(settings=STORE)
def list_collections(settings: Config, json: JsonOpt = False) -> None:
    """List the collections in a store."""
    with _catalogue(settings) as (_, catalogue):
        found = [_summary(as_dict(collection)) for collection in catalogue.collections().values()]
    if json:
        console.print_json({"collections": found})
        return
    rows = [
        (
            c["name"],
            c["reader"],
            f"{c['chunks']:,}",
            f"{c['tokens']:,}",
            f"{c['n_bytes'] / 1e6:,.0f} MB",
            ", ".join(c["levels"]),
            "yes" if c["pinned"] else "no",
            c["published"],
        )
        for c in found
    ]
    columns = ("name", "reader", "chunks", "tokens", "stored", "levels", "pinned", "published")
    console.table("collections", columns, rows)


@app.command()
@with_options(settings=STORE)
def pin(name: NameArg, settings: Config) -> None:
    """Protect a collection's chunks from eviction."""
    _set_pins(name, settings, True)


@app.command()
@with_options(settings=STORE)
def unpin(name: NameArg, settings: Config) -> None:
    """Allow eviction of a collection's chunks.

    Chunks of other pinned collections stay pinned.
    """
    _set_pins(name, settings, False)


@app.command()
@with_options(settings=STORE)
def retire(
    name: NameArg,
    settings: Config,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete its chunks at once, except those of other collections.")
    ] = False,
) -> None:
    """Unpublish a collection.

    Services stop delivering it within seconds, and its chunks can be evicted.
    """
    from blendserve.kdn.publish import retire as run  # with torch: seconds

    with _catalogue(settings) as (store, catalogue):
        n = run(store, catalogue, name, delete)
    console.out.print(f"retired {name}: {n} chunks {'deleted' if delete else 'unpinned'}", markup=False)


@app.command()
def warm(
    name: NameArg,
    node: Annotated[
        list[str],
        typer.Option(help="URL of an engine to prefetch into, a `blendserve serve`. Repeatable."),
    ],
) -> None:
    """Prefetch a collection's KV into the stores of engines.

    The engines must serve the collection (`-i kdn:URL/NAME`) and have a store of their own in front of it. If they
    have API keys, the key is read from BLENDSERVE_NODE_KEY. The exit code is 1 if an engine rejects the request.
    """
    import httpx  # a tenth of a second, and an extra

    key = os.environ.get(NODE_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    failed = False
    for url in node:
        order = f"{url.rstrip('/')}/v1/cache/fetch"
        try:
            reply = httpx.post(order, json={"collection": name}, headers=headers)
            good, said = reply.status_code == 202, reply.text
            said = f"fetching, job {reply.json()['id']}" if good else said
        except (httpx.HTTPError, ValueError) as error:
            good, said = False, str(error)
        failed |= not good
        console.out.print(f"{url}: {said}", markup=False)
    if failed:
        raise typer.Exit(1)


@app.command()
@with_options(settings=Options(Config(), "store.namespace", load=Config.load))
def pull(
    source: Annotated[str, typer.Argument(help="Collection, written kdn:URL/NAME.")],
    folder: Annotated[str, typer.Argument(help="Folder for the index, or its name in indexes/.")],
    settings: Config,
) -> None:
    """Fetch a collection's index, without KV, into a folder.

    Commands with `-i kdn:URL/NAME` do the same into the user's cache. If the service has API keys, the key is read
    from BLENDSERVE_KDN_KEY.
    """
    from blendserve.kdn.pull import location_of
    from blendserve.kdn.pull import pull as run  # with torch: seconds
    from blendserve.paths import index_folder

    collection = settings.store.replace("location", location_of(source))
    found = run(collection.kdn, index_folder(folder), settings.store.namespace)
    console.out.print(f"{found}: next: blendserve ask ... -i {source}", markup=False)


@app.command()
def relay(
    bind: Annotated[str, typer.Option(help="Address to listen on, HOST:PORT.")] = "127.0.0.1:4443",
    cache_mb: Annotated[
        int, typer.Option(min=1, help="Size of the cache of delivered chunks, in MB (10^6 bytes).")
    ] = 1024,
) -> None:
    """Run a MoQ relay that delivers chunks to many engines.

    It prints its URL and its certificate's fingerprint, for `kdn feed` and the setting store.remote.relay.
    It has no API keys: bind it where only your engines can reach it (docs/reference/moq.md).
    """
    import asyncio

    from blendserve.kdn.moq import relay as run  # with torch: seconds

    async def forever() -> None:
        async with run(bind, cache_mb * 1_000_000) as server:
            console.note(f"Relaying on https://{server.local_addr} {server.cert_fingerprints()[0]}")
            await asyncio.Event().wait()

    asyncio.run(forever())


@app.command()
@with_options(settings=STORE)
def feed(
    url: Annotated[str, typer.Argument(help="URL of the relay, https://HOST:PORT.")],
    settings: Config,
    fingerprint: Annotated[
        str,
        typer.Option(
            help="SHA-256 of the relay's certificate, in hex; without it, the certificate must be "
            "signed by a trusted authority."
        ),
    ] = "",
) -> None:
    """Publish a store's collections on a MoQ relay.

    A chunk is sent to the relay once, when the first engine asks for it, for any number of engines.
    """
    import asyncio

    from blendserve.kdn.moq import Publisher  # with torch: seconds

    with _catalogue(settings) as (store, _):
        publisher = Publisher(store, url, fingerprint)
        asyncio.run(publisher.run())


def _set_pins(name: str, settings: Config, pinned: bool) -> None:
    from blendserve.kdn.publish import set_pins  # with torch: seconds

    with _catalogue(settings) as (store, catalogue):
        n = set_pins(store, catalogue, name, pinned)
    console.out.print(f"{name}: {n} chunks {'pinned' if pinned else 'unpinned'}", markup=False)


@contextmanager
def _catalogue(settings: Config) -> Iterator[tuple[Any, Any]]:
    """The store, and the collections in it."""
    from blendserve.fetch import open_store
    from blendserve.kdn.catalogue import Catalogue

    with open_store(settings.store, None, persistent=True) as store:
        yield store, Catalogue(store)


@contextmanager
def _workers(n: int, index: str, settings: Config) -> Iterator[None]:
    """Processes that precompute the same index into the same store. They exit when done, or with this one."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="blendserve-workers-") as folder:
        file = Path(folder) / "settings.yaml"
        file.write_text(settings.to_yaml())
        command = [sys.executable, "-m", "blendserve", "precompute", index, "-c", str(file)]
        started = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(n)
        ]
        try:
            yield
        finally:
            for worker in started:
                worker.terminate()
                worker.wait()


def _summary(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out the fields that only client programs need."""
    return {k: v for k, v in values.items() if k not in ("files", "directory", "tables")}
