"""`blendserve keys ...`: the API keys of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.options import make_app

app = make_app("Create, list and revoke API keys of the server.")

KEYS = Path("keys.json")
FileOpt = Annotated[Path, typer.Option("--file", help="Key file, as given to `serve --keys`.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the key's owner; each name has one key.")],
    file: FileOpt = KEYS,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="Namespace of the KV cache; keys of other namespaces never hit it. [default: NAME]"
        ),
    ] = None,
    collection: Annotated[
        list[str] | None,
        typer.Option(
            help="Collection that the key may use; repeat it for several. [default: all collections]"
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse adding and deleting documents.")
    ] = False,
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow access to /metrics and to other admin routes.")
    ] = False,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Concurrent requests. [default: the server's limit]")
    ] = None,
    max_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests per minute. [default: the server's limit]")
    ] = None,
) -> None:
    """Create a key and print it once.

    The file stores only the key's hash.
    """
    from blendserve.serve.keys import KeyFile, Tenant

    tenant = Tenant(
        name=name,
        namespace=name if namespace is None else namespace,
        collections=tuple(collection) if collection else None,
        read_only=read_only,
        admin=admin,
        max_concurrent=max_concurrent,
        max_per_minute=max_per_minute,
    )
    console.out.print(KeyFile(file).create(tenant), markup=False)


@app.command("list")
def list_keys(file: FileOpt = KEYS) -> None:
    """List the owners of keys and their rights."""
    from blendserve.serve.keys import KeyFile

    rows = [
        (
            t.name,
            t.namespace,
            "all" if t.collections is None else ", ".join(t.collections),
            ", ".join(word for word, on in (("read-only", t.read_only), ("admin", t.admin)) if on),
        )
        for t in KeyFile(file).tenants()
    ]
    console.table(str(file), ("name", "namespace", "collections", "rights"), rows)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key's owner.")], file: FileOpt = KEYS
) -> None:
    """Revoke a key. A running server refuses it at once."""
    from blendserve.serve.keys import KeyFile

    KeyFile(file).revoke(name)
