"""`blendserve store ...` and `blendserve codec ...`: stored KV, and how it is coded."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendserve import console
from blendserve.cli.options import MANY, IndexArg, make_app, option, with_options, with_settings
from blendserve.config import Config
from blendserve.console import Output
from blendserve.errors import ConfigError, InputError, StoreUnavailable
from blendserve.extras import install_hint
from blendserve.paths import index_folder
from blendserve.registry import CODECS

if TYPE_CHECKING:
    from blendserve.store import KVStore

store = make_app("Inspect, repair and merge KV stores.")
codec = make_app("List codecs of stored KV, and fit their tables.")


def _open(index: str, settings: Config, read_only: bool = True) -> KVStore:
    """The store of an index. Raises StoreError, also for one that cannot be written if it is to be."""
    from blendserve.fetch import open_store  # torch: a second

    store = open_store(settings.store, index_folder(index) / "kv", read_only, persistent=True)
    if store.read_only and not read_only:
        store.close()
        raise StoreUnavailable(f"the KV store {store.location} cannot be written: check its permissions")
    return store


@store.command()
@with_settings("store.location")
def stats(index: IndexArg, settings: Config) -> Output:
    """Show chunks, bytes, capacity and traffic of the store."""
    with _open(index, settings) as store:
        return Output(store.stats().to_dict())


@store.command()
@with_settings("store.location")
def verify(
    index: IndexArg,
    settings: Config,
    repair: bool = option(
        False, "Delete bad chunks and tables; `precompute` and `codec fit` restore them.", "--repair"
    ),
) -> Output:
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
    lines = [
        f"{report.good} chunks good, {len(report.bad)} bad{', deleted' if repair else ''}",
        *(f"  {key}  {problem}" for key, problem in report.bad),
        *(f"  tables {hash}  {problem}" for hash, problem in report.bad_tables),
    ]
    remains = (report.bad or report.bad_tables) and not repair
    return Output({**report.to_dict(), "repaired": repair}, "\n".join(lines), int(bool(remains)))


@store.command()
@with_settings("store.location")
def merge(
    index: IndexArg,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="STORE...", help="Stores to copy from: folders, or URLs of servers."),
    ],
    settings: Config,
) -> Output:
    """Copy chunks from other stores into the index's store.

    The password and the deadline for servers are store.secret_file and store.deadline_s. The exit code is 1 if a source
    chunk is damaged.
    """
    from blendserve.fetch import open_store  # torch: a second
    from blendserve.store.merge import merge

    copied = damaged = 0
    with _open(index, settings, read_only=False) as into:
        for name in sources:
            place = settings.store.replace("location", name)
            with (
                open_store(place, None, read_only=True, persistent=True) as source,
                console.progress(name, "chunks") as update,
            ):
                new, bad = merge(source, into, update)
                copied += new
                damaged += bad
    return Output({"copied": copied, "damaged": damaged}, exit_code=int(damaged > 0))


@codec.command("list")
@with_options()
def list_codecs() -> Output:
    """List codecs with their levels, the finest first."""
    columns = ("codec", "levels", "needs tables=needs_tables", "problem")
    return console.listing("codecs", [_describe(name) for name in CODECS.names], "Codecs", columns)


@codec.command()
@with_settings("store.location")
def show(index: IndexArg, settings: Config) -> Output:
    """Show the codec tables in an index's store.

    New chunks use the current tables.
    """
    with _open(index, settings) as store:
        found = [
            {
                "hash": info.hash.hex(),
                "codec": info.kind,
                "reader_fingerprint": info.owner,
                "bytes": info.n_bytes,
                "current": store.blobs.current(info.kind, info.owner) == info.hash,
            }
            for info in store.blobs.list()
        ]
    columns = ("hash", "codec", "bytes", "current", "model fingerprint=reader_fingerprint")
    return console.listing("tables", found, "Tables", columns)


@codec.command("fit")
@with_settings("model.name", "store.location", "retrieve.chunk_tokens")
def fit_tables(
    index: IndexArg,
    settings: Config,
    codec: list[str] | None = option(
        None,
        "Codec to fit tables for. Repeatable. [default: every installed codec that needs tables]",
        metavar=MANY,
    ),
    text: list[Path] | None = option(
        None,
        "File or folder with text to fit on, as for `index build`. Repeatable. [default: text "
        "that the model generates]",
        metavar="PATH...",
    ),
    tokens: int = option(16_384, "Number of tokens to fit on, taken from all files in turn.", min=1),
) -> Output:
    """Fit a codec's tables for a model, and put them into an index's store.

    New chunks use the new tables, stored chunks keep their tables. All tenants of the store share the tables, so fit on
    text whose statistics all of them may see. Text similar to your documents makes their KV smaller.

    \b
        blendserve codec fit docs                               # every codec that needs tables
        blendserve codec fit docs --codec NAME --text corpus.jsonl --text notes/
    """
    names = _check_codecs(codec or [])
    from blendserve.engine.codec_fit import chunks_of, fit, self_generated_text  # with torch: seconds
    from blendserve.engine.prompt import PromptBuilder
    from blendserve.models.loader import load_model
    from blendserve.retrieve import read_documents, read_manifest

    if not settings.store.path:
        read_manifest(index_folder(index))  # report a mistyped name before minutes of work
    tables = []
    with _open(index, settings.replace("store.codec", CODECS.default), read_only=False) as store:
        texts = [list(read_documents(path)) for path in text or []]
        model = load_model(settings.model)
        prompts = PromptBuilder(model.tokenizer, settings.prompt)
        if texts:  # documents of all texts in turns, so that the first tokens are of each kind
            documents = [
                document for turn in zip_longest(*texts) for document in turn if document is not None
            ]
            chunks = chunks_of(documents, tokens, settings, prompts)
        else:
            with console.progress("Sampling text from the model", "tokens") as drawing:
                chunks = self_generated_text(model, tokens, drawing)
        for name in names:
            computing = console.progress(f"{name}: computing KV", "tokens", model.decoder.kv_bytes_per_token)
            with computing as computed, console.progress(f"{name}: fitting", "steps") as fitted:
                hash = fit(name, chunks, model, prompts, store, computed, fitted)
            size = next(info.n_bytes for info in store.blobs.list() if info.hash == hash)
            tables.append({"codec": name, "hash": hash.hex(), "bytes": size})
    lines = [f"{t['codec']}: tables {t['hash']}, {t['bytes']:,} bytes" for t in tables]
    values = {"reader": model.name, "reader_fingerprint": model.fingerprint, "tables": tables}
    return Output(values, "\n".join(lines))


def _describe(name: str) -> dict[str, Any]:
    try:
        found = CODECS.load(name)
    except (ImportError, ValueError) as error:
        return {"codec": name, "levels": [], "needs_tables": True, "problem": str(error)}
    level = {"default_level": found.default_level, "needs_tables": found.needs_tables}
    return {"codec": name, "levels": list(found.levels), **level}


def _check_codecs(names: list[str]) -> list[str]:
    """The codecs to fit, by default all that need tables. Raises ConfigError, InputError."""
    for found in map(_describe, names):
        if "problem" in found:
            raise ConfigError(found["problem"])
        if not found["needs_tables"]:
            raise InputError(f"codec {found['codec']!r} needs no tables: set store.codec to it")
    known = [d["codec"] for d in map(_describe, CODECS.names) if d["needs_tables"] and "problem" not in d]
    if not (names or known):
        raise InputError(f"no installed codec needs tables: {install_hint('codecs')}")
    return names or known
