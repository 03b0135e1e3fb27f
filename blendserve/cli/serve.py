"""`blendserve serve` and `blendserve keys`: parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blendserve import console
from blendserve.config import changed
from blendserve.errors import ConfigError
from blendserve.serve.settings import Config, ServeConfig, effective, load_settings

SERVE = ServeConfig()

keys_app = typer.Typer(help="API keys of the server.", no_args_is_help=True)

ConfigOpt = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file with settings, those of the server included.")
]
FileOpt = Annotated[Path, typer.Option("--file", help="The file of keys, which `serve --keys` reads.")]
KEYS = Path("keys.json")


def _option(about: str, default: object) -> Any:
    return typer.Option(help=f"{about} [default: {default}]")


def serve(
    index: Annotated[
        list[str] | None,
        typer.Option(
            "--index",
            "-i",
            help="Index: a folder, or a name in indexes/. Again for more collections; the first one's store is used. "
            "[default: indexes/demo]",
        ),
    ] = None,
    config: ConfigOpt = None,
    model: Annotated[str | None, typer.Option(help="Reader: bundled name, folder or hub id.")] = None,
    method: Annotated[
        str | None, typer.Option(help="auto, blend, full, prefix or reuse, where a request names none.")
    ] = None,
    host: Annotated[str | None, _option("Address to bind to; others need --keys.", SERVE.host)] = None,
    port: Annotated[int | None, _option("0 = any free one.", SERVE.port)] = None,
    keys: Annotated[Path | None, typer.Option(help="File of API keys. [default: nobody needs one]")] = None,
    slots: Annotated[int | None, _option("Requests that decode together.", SERVE.slots)] = None,
    slot_tokens: Annotated[
        int | None,
        typer.Option(help="Prompt and answer of a request, at most. [default: the reader's context]"),
    ] = None,
    queue: Annotated[int | None, _option("Requests that may wait.", SERVE.queue)] = None,
    drain_s: Annotated[float | None, _option("Seconds to finish in after SIGTERM.", SERVE.drain_s)] = None,
    log_text: Annotated[
        bool | None, typer.Option("--log-text/--no-log-text", help="Log questions. [default: no]")
    ] = None,
) -> None:
    """Serve an index over HTTP, to OpenAI's clients and others."""
    settings = load_settings(config)
    flags = {
        "host": host,
        "port": port,
        "keys": keys,
        "slots": slots,
        "slot_tokens": slot_tokens,
        "queue": queue,
        "drain_s": drain_s,
        "log_text": log_text,
    }
    settings = Config(
        **{
            **settings.model_dump(),
            "reader": changed(settings.reader, model=model).model_dump(),
            "blend": changed(settings.blend, method=method).model_dump(),
            "serve": changed(settings.serve, **flags).model_dump(),
        }
    )
    indexes = index or ["indexes/demo"]
    run = _runner()
    console.say(effective(settings, indexes))
    run(settings, indexes, console.say)


@keys_app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whose key; one each.")],
    file: FileOpt = KEYS,
    namespace: Annotated[
        str | None, typer.Option(help="Of his KV, which nobody else hits. [default: the name]")
    ] = None,
    collection: Annotated[
        list[str] | None, typer.Option(help="Index that he may use; may be given again. [default: all]")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="May not add or delete documents.")] = False,
    admin: Annotated[bool, typer.Option("--admin", help="May read /metrics.")] = False,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at a time.")] = None,
    max_per_minute: Annotated[int | None, typer.Option(min=1, help="Requests a minute.")] = None,
) -> None:
    """Make a key and print it, once: the file holds only its hash."""
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


@keys_app.command("list")
def list_keys(file: FileOpt = KEYS) -> None:
    """Who has a key."""
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


@keys_app.command("revoke")
def revoke(name: Annotated[str, typer.Argument(help="Whose key.")], file: FileOpt = KEYS) -> None:
    """Remove a key; a running server refuses it at once."""
    from blendserve.serve.keys import KeyFile

    KeyFile(file).revoke(name)


def _runner() -> Any:
    """The server's own imports, which are an extra. Raises ConfigError when they are not installed."""
    try:
        from blendserve.serve.running import serve as run
    except ImportError as error:
        raise ConfigError(
            f"the server needs more packages: pip install 'blendserve[serve]' ({error})"
        ) from None
    return run
