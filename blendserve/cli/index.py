"""`blendserve index ...`: documents to passages to vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blendserve import console
from blendserve.cli.options import IndexArg, JsonOpt, Options, make_app, with_options
from blendserve.cli.show import as_dict
from blendserve.config import Config

app = make_app("Build and update indexes of documents.")

CorpusArg = Annotated[
    Path,
    typer.Argument(
        help="Corpus: a JSONL file with `text` and optional `title` and `id` per line, a folder "
        "of .txt and .md files, or one such file."
    ),
]
READER = Options(Config(), "model.name", load=Config.load)


@app.command()
@with_options(
    settings=Options(
        Config(),
        "model.name",
        "retrieve.chunk_tokens",
        "retrieve.embedder",
        "retrieve.index",
        load=Config.load,
        names={"retrieve.index": "kind"},
    )
)
def build(corpus: CorpusArg, index: IndexArg, settings: Config, json: JsonOpt = False) -> None:
    """Build an index of a corpus.

    An existing index of the same name is replaced.
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds
    from blendserve.retrieve import read_documents

    documents = list(read_documents(corpus))
    with console.progress("Embedding", "windows") as update:
        engine = Engine.build(index, documents, settings, update)
    with engine:
        _print(engine, json)


@app.command()
@with_options(settings=READER)
def add(corpus: CorpusArg, index: IndexArg, settings: Config, json: JsonOpt = False) -> None:
    """Add the new documents of a corpus to an index.

    A document with a known id and new text replaces the old one. Unchanged documents are skipped.
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds
    from blendserve.retrieve import read_documents

    documents = list(read_documents(corpus))
    with Engine.open(index, settings) as engine:
        with console.progress("Embedding", "windows") as update:
            added = engine.add(documents, update)
        _print(engine, json, added=added)


@app.command()
@with_options(settings=READER)
def delete(
    index: IndexArg,
    doc_ids: Annotated[list[str], typer.Argument(help="Ids of the documents to remove.")],
    settings: Config,
    json: JsonOpt = False,
) -> None:
    """Remove documents with their passages, vectors and KV.

    The exit code is 1 if the index had none of them.
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds

    with Engine.open(index, settings) as engine:
        deleted = engine.delete(*doc_ids)
        _print(engine, json, deleted=deleted)
    if not deleted:
        raise typer.Exit(1)


def _print(engine: Any, json: bool, **more: Any) -> None:
    index = engine.index
    facts = {"index": str(index.path), **as_dict(index.manifest), **more}
    if json:
        console.print_json(facts)
        return
    change = "".join(f" ({count} {what})" for what, count in more.items())
    console.out.print(
        f"{index.path}: {facts['documents']} documents{change}, {facts['passages']} passages, "
        f"{facts['vectors']} vectors; next: blendserve precompute {index.path}"
    )
