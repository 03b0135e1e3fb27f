"""`blendserve kdn ...`: publish collections as files, verify and serve them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.options import MANY, IndexArg, make_app, option, with_options, with_settings
from blendserve.config import COLLECTION, Config
from blendserve.console import Output

kdn = make_app("Publish collections as files, which any web server or object store delivers to engines.")
PlaceArg = Annotated[
    str,
    typer.Argument(
        help="Place of the collection: FOLDER/NAME, s3://BUCKET/NAME, or another URL that ends in its name."
    ),
]


@kdn.command()
@with_settings("model.name", "store.location")
def publish(
    index: IndexArg,
    target: PlaceArg,
    settings: Config,
    level: list[str] | None = option(
        None,
        "Extra codec to encode every chunk with, as name or name@level, for engines with slower links. "
        "Repeatable. It encodes what store.codec stores.",
        metavar=MANY,
    ),
    sign: Path | None = option(None, "File with an Ed25519 private key (PEM) to sign the collection with."),
    prune: float | None = option(
        None, "Delete files afterwards that no version of so many days names.", min=1, max=90, metavar="DAYS"
    ),
) -> Output:
    """Publish an index as a collection of files.

    The command writes texts, vectors and KV. It computes missing KV, together with every `blendserve precompute` on the
    same index and store. Publish again to update what changed, or to resume:

    \b
        blendserve index build corpus.jsonl docs
        blendserve kdn publish docs s3://bucket/manual --level predict@1 --level predict@3
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds
    from blendserve.kdn.publish import publish as run
    from blendserve.kdn.target import PublishTarget
    from blendserve.kdn.upkeep import prune as delete_unnamed

    key = sign.read_bytes() if sign else None
    place = PublishTarget(target)
    with Engine.open(index, settings) as engine:
        per_token = engine.model.decoder.kv_bytes_per_token
        with (
            console.progress("Precomputing", "tokens", per_token) as computed,
            console.progress("Sampling text from the model", "tokens") as sampled,
            console.progress("Fitting tables", "steps") as fitted,
            console.progress("Publishing", "chunks") as encoded,
        ):
            made = run(engine, place, level or (), key, computed, encoded, sampled, fitted)
    deleted = delete_unnamed(place, prune) if prune else 0
    facts = {
        "name": made.name,
        "levels": made.levels,
        "chunks": made.chunks,
        "tokens": made.tokens,
        "bytes": made.n_bytes,
        "written": place.written,
        "deleted": deleted,
        "signed": bool(made.signature),
    }
    text = (
        f"published {made.name}: {made.chunks} chunks, {made.tokens:,} tokens, {made.n_bytes / 1e6:,.0f} MB at "
        f"{', '.join(made.levels)}; {place.written / 1e6:,.1f} MB written, {deleted} old files deleted; next: "
        f"blendserve ask ... -i {COLLECTION}{target.removeprefix(COLLECTION)}"
    )
    return Output(facts, text)


@kdn.command()
@with_options()
def verify(
    source: PlaceArg,
    trust: Path | None = option(
        None, "File with the publisher's public key (PEM), whose signature is required."
    ),
) -> Output:
    """Read every file of a collection and check its hash.

    The exit code is 1 if a file is missing or damaged: delete it and publish again.
    """
    from blendserve.kdn.upkeep import verify as run  # with torch: seconds

    location = f"{COLLECTION}{source.removeprefix(COLLECTION)}"
    place = Config().replace("store.location", location).store.replace("trust", trust)
    with console.progress("Verifying", "files") as update:
        collection, problems = run(place.kdn, update)
    text = f"{collection.name}: {collection.chunks} chunks at {', '.join(collection.levels)}, {len(problems)} problems"
    facts = {"name": collection.name, "chunks": collection.chunks, "problems": problems}
    return Output(facts, "\n".join([*problems, text]), int(bool(problems)))


@kdn.command()
@with_settings("deliver.host", "deliver.port", "deliver.keys", "deliver.drain_s")
def serve(
    folder: Annotated[Path, typer.Argument(help="Folder that collections were published into.")],
    settings: Config,
) -> None:
    """Serve published collections over HTTP.

    Any web server does the same. This one has API keys, which decide who may read which collection (`blendserve keys
    create NAME --collection ...`), and quotas.
    """
    from blendserve.serve.delivery import serve as run  # with torch: seconds

    run(folder, settings)
