"""`blendserve store ...`: the KV store of an index."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from blendserve import console
from blendserve.cli.options import IndexArg, JsonOpt, Options, make_app, with_options
from blendserve.cli.show import print_dict
from blendserve.config import Config

app = make_app("Inspect, repair and merge KV stores.")

STORE = Options(Config(), "store.location", load=Config.load)


@app.command()
@with_options(settings=STORE)
def stats(index: IndexArg, settings: Config, json: JsonOpt = False) -> None:
    """Show chunks, bytes, capacity and traffic of the store."""
    with _open(index, settings) as store:
        print_dict(store.stats().to_dict(), json)


@app.command()
@with_options(settings=STORE)
def verify(
    index: IndexArg,
    settings: Config,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Delete bad chunks and tables; `precompute` and `codec fit` restore them.",
        ),
    ] = False,
    json: JsonOpt = False,
) -> None:
    """Verify every chunk and the codec tables of the store.

    The exit code is 1 if a bad chunk or table remains.
    """
    with _open(index, settings, read_only=not repair) as store:
        with console.progress("Verifying", "chunks") as update:
            report = store.verify(update)
        if repair:
            store.delete(bytes.fromhex(key) for key, _ in report.bad)
            for hash, _ in report.bad_tables:
                store.blobs.delete(bytes.fromhex(hash))
        if json:
            console.print_json({**report.to_dict(), "repaired": repair})
        else:
            console.out.print(
                f"{report.good} chunks good, {len(report.bad)} bad{', deleted' if repair else ''}"
            )
            for key, problem in report.bad:
                console.out.print(f"  {key}  {problem}", markup=False)
            for hash, problem in report.bad_tables:
                console.out.print(f"  tables {hash}  {problem}", markup=False)
        if (report.bad or report.bad_tables) and not repair:
            raise typer.Exit(1)


@app.command()
@with_options(settings=STORE)
def merge(
    index: IndexArg,
    sources: Annotated[
        list[str],
        typer.Argument(help="Stores to copy from: folders, or URLs of servers."),
    ],
    settings: Config,
    json: JsonOpt = False,
) -> None:
    """Copy chunks from other stores into the index's store.

    Password and deadline for servers come from store.secret_file and store.deadline_s. The exit code is 1 if a source
    chunk is damaged.
    """
    from blendserve.store.merge import merge  # torch: a second

    copied = damaged = 0
    with _open(index, settings, read_only=False) as into:
        for name in sources:
            with _source(name, settings) as source, console.progress(name, "chunks") as update:
                new, bad = merge(source, into, update)
                copied, damaged = copied + new, damaged + bad
    print_dict({"copied": copied, "damaged": damaged}, json)
    if damaged:
        raise typer.Exit(1)


def _source(name: str, settings: Config) -> Any:
    """The store in a folder or on a server. Raises ConfigError, StoreError."""
    from blendserve.fetch import open_store  # torch: a second

    return open_store(settings.store.replace("location", name), None, read_only=True, persistent=True)


def _open(index: str, settings: Config, read_only: bool = True) -> Any:
    from blendserve.fetch import open_store  # torch: a second
    from blendserve.paths import index_folder

    return open_store(settings.store, index_folder(index) / "kv", read_only, persistent=True)
