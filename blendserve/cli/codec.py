"""`blendserve codec ...`: how KV is coded, and the tables that some codecs need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blendserve import console
from blendserve.cli.options import IndexArg, JsonOpt, Options, make_app, with_options
from blendserve.config import Config
from blendserve.errors import ConfigError, InputError
from blendserve.extras import install_hint
from blendserve.registry import CODECS, DELIVERED

app = make_app("List codecs of stored KV, and fit their tables.")

READER = Options(
    Config(),
    *("model.name", "store.location", "retrieve.chunk_tokens"),
    load=Config.load,
)
STORE = Options(
    Config(),
    "store.location",
    load=Config.load,
)


@app.command("list")
def list_codecs(json: JsonOpt = False) -> None:
    """List codecs with their levels, the finest first."""
    found = [_described(name) for name in CODECS.names]
    if json:
        console.print_json({"codecs": found})
        return
    rows = [
        (
            c["codec"],
            ", ".join(map(str, c["levels"])) or "not installed",
            "yes" if c["needs_tables"] else "no",
        )
        for c in found
    ]
    console.table("Codecs", ("codec", "levels", "needs tables"), rows)


@app.command()
@with_options(settings=STORE)
def show(index: IndexArg, settings: Config, json: JsonOpt = False) -> None:
    """Show the codec tables in an index's store.

    New chunks are coded with the current tables.
    """
    from blendserve.fetch import open_store  # torch: a second
    from blendserve.paths import index_folder

    with open_store(settings.store, index_folder(index) / "kv", read_only=True, persistent=True) as store:
        infos = [info for info in store.blobs.list() if info.kind != DELIVERED]  # collections lie beside them
        current = [store.blobs.current(info.kind, info.owner) == info.hash for info in infos]
    found = [
        {
            "hash": info.hash.hex(),
            "codec": info.kind,
            "reader_fingerprint": info.owner,
            "bytes": info.n_bytes,
            "current": now,
        }
        for info, now in zip(infos, current, strict=True)
    ]
    if json:
        console.print_json({"tables": found})
        return
    rows = [
        (i.hash.hex(), i.kind, f"{i.n_bytes:,}", "yes" if now else "no", i.owner)
        for i, now in zip(infos, current, strict=True)
    ]
    console.table("Tables", ("hash", "codec", "bytes", "current", "model fingerprint"), rows)


@app.command("fit")
@with_options(settings=READER)
def fit_tables(
    index: IndexArg,
    settings: Config,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help="Codec to fit tables of, repeatable; every installed codec that needs tables if not given."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="File or folder with text to fit on, as for `index build`, repeatable; text "
            "sampled from the model if not given."
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Length of the text to fit on, in tokens, taken from all files in turn."),
    ] = 16_384,
    json: JsonOpt = False,
) -> None:
    """Fit a codec's tables for a model, into an index's store.

    New chunks are coded with the new tables; stored chunks keep theirs. All tenants of the store share the tables,
    so fit on text whose statistics all of them may see. The closer the text is to the stored documents, the smaller
    is their KV.

    \b
        blendserve codec fit docs                               # every codec that needs tables
        blendserve codec fit docs --codec NAME --text corpus.jsonl --text notes/
    """
    names = _fitted(codec or [])
    from blendserve.engine.codec_fit import (  # torch and all the rest: seconds
        chunks_of,
        fit,
        self_generated_text,
    )
    from blendserve.engine.prompt import PromptBuilder
    from blendserve.fetch import open_store
    from blendserve.models.loader import load_model
    from blendserve.paths import index_folder
    from blendserve.retrieve import read_documents
    from blendserve.retrieve.manifest import read_manifest

    if not settings.store.path:
        read_manifest(index_folder(index))  # report a mistyped name before minutes of work
    documents = [list(read_documents(path)) for path in text or []]
    reader = load_model(settings.model)
    prompts = PromptBuilder(reader.tokenizer, settings.prompt)
    if documents:
        chunks = chunks_of(_mixed(documents), tokens, settings, prompts)
    else:
        with console.progress("Sampling text from the model", "tokens") as drawing:
            chunks = self_generated_text(reader, tokens, drawing)
    raw = settings.store.model_copy(update={"codec": CODECS.default})
    with open_store(raw, index_folder(index) / "kv", persistent=True) as store:
        done = []
        for name in names:
            per_token = reader.adapter.kv_bytes_per_token
            with console.progress_twice(
                f"{name}: computing KV", f"{name}: fitting", ("tokens", "steps"), per_token
            ) as bars:
                hash = fit(name, chunks, reader, prompts, store, *bars)
            size = next(info.n_bytes for info in store.blobs.list() if info.hash == hash)
            done.append({"codec": name, "hash": hash.hex(), "bytes": size})
    if json:
        console.print_json({"reader": reader.name, "reader_fingerprint": reader.fingerprint, "tables": done})
    else:
        for tables in done:
            console.out.print(f"{tables['codec']}: tables {tables['hash']}, {tables['bytes']:,} bytes")


def _described(name: str) -> dict[str, Any]:
    try:
        made = CODECS.load(name)
    except ImportError as error:
        return {"codec": name, "levels": [], "needs_tables": True, "problem": str(error)}
    return {
        "codec": name,
        "levels": list(made.levels),
        "default_level": made.default_level,
        "needs_tables": made.needs_tables,
    }


def _fitted(names: list[str]) -> list[str]:
    """The codecs to fit. Raises ConfigError, InputError."""
    for name in names:
        try:
            CODECS.check(name)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        described = _described(name)
        if "problem" in described:
            raise ConfigError(described["problem"])
        if not described["needs_tables"]:
            raise InputError(f"codec {name!r} needs no tables: set store.codec to it")
    known = [d["codec"] for d in map(_described, CODECS.names) if d["needs_tables"] and "problem" not in d]
    if not (names or known):
        raise InputError(f"no installed codec needs tables: {install_hint('codecs')}")
    return names or known


def _mixed(texts: list[list[Any]]) -> list[Any]:
    """Documents of all texts in turns, so that the first tokens are of each kind."""
    longest = max(map(len, texts), default=0)
    return [documents[n] for n in range(longest) for documents in texts if n < len(documents)]
