"""`blendserve keys ...`: who may use the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.options import make_app

app = make_app("Make, list and revoke API keys of the server.")

KEYS = Path("keys.json")
FileOpt = Annotated[
    Path, typer.Option("--file", help="Keep the keys in this file, which `serve --keys` reads.")
]


@app.command()
def create(
    name: Annotated[
        str, typer.Argument(help="The key belongs to the tenant of this name, who has no other.")
    ],
    file: FileOpt = KEYS,
    namespace: Annotated[
        str | None,
        typer.Option(help="Keep their KV under this name, which nobody else's hits. [default: NAME]"),
    ] = None,
    collection: Annotated[
        list[str] | None,
        typer.Option(
            help="They may use this index only. It may be given again; without it, they may use all."
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="They may not add or delete documents.")
    ] = False,
    admin: Annotated[bool, typer.Option("--admin", help="They may read /metrics.")] = False,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="They may have so many requests at a time.")
    ] = None,
    max_per_minute: Annotated[
        int | None, typer.Option(min=1, help="They may send so many requests a minute.")
    ] = None,
) -> None:
    """Make a key and print it, once.

    The file holds only the key's hash. Limits that are not given are the server's.
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
    """Show who has a key."""
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
    name: Annotated[str, typer.Argument(help="The key of this tenant is removed.")], file: FileOpt = KEYS
) -> None:
    """Remove a key; a running server refuses it at once."""
    from blendserve.serve.keys import KeyFile

    KeyFile(file).revoke(name)
