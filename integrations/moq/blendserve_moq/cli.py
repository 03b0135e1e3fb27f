"""`blendserve-moq`: a relay, and the publisher of a collection."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.app import run
from blendserve.cli.options import make_app, option
from blendserve.config import COLLECTION, Config
from blendserve_moq.relay import Publisher
from blendserve_moq.relay import relay as serve

app = make_app("Deliver collections over MoQ (experimental).")


@app.command()
def relay(
    bind: str = option("127.0.0.1:4443", "Address to listen on, HOST:PORT."),
    cache_mb: int = option(1024, "Size of the cache of delivered chunks, in MB (10^6 bytes).", min=1),
) -> None:
    """Run a relay that delivers chunks to many engines.

    It prints its URL and its certificate's fingerprint, for `publish` and for the location of the engines' store. It has
    no API keys, so only your engines may reach it.
    """

    async def forever() -> None:
        async with serve(bind, cache_mb * 1_000_000) as server:
            console.note(f"Relaying on https://{server.local_addr} {server.cert_fingerprints()[0]}")
            await asyncio.Event().wait()

    asyncio.run(forever())


@app.command()
def publish(
    source: Annotated[
        str, typer.Argument(help="The collection: FOLDER/NAME, https://HOST/NAME or s3://BUCKET/NAME.")
    ],
    url: Annotated[str, typer.Argument(help="URL of the relay, https://HOST:PORT.")],
    fingerprint: str = option(
        "",
        "SHA-256 of the relay's certificate, in hex; without it, the certificate must be signed "
        "by a trusted authority.",
    ),
) -> None:
    """Publish a collection on a relay.

    A chunk is sent to the relay once, when the first engine asks for it, for any number of engines.
    """
    store = Config().replace("store.location", f"{COLLECTION}{source.removeprefix(COLLECTION)}").store
    asyncio.run(Publisher(store.kdn, url, fingerprint).run())


def main() -> int:
    """Run the command line and return its exit code."""
    return run(app)
