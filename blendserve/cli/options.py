"""Options that are settings: type, choices, default and help are read from the settings' own fields.

    @single_command
    @with_settings("model.name", "blend.ratio")
    def ask(question: ..., settings: Config) -> Output: ...

gives `ask` the options --config, --set, --model and --ratio in the place of its parameter `settings`, and --json.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce, wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from blendserve.config import BASIC, Config, Settings
from blendserve.console import Output
from blendserve.registry import Registry


def option(default: Any, help: str, *flags: str, **details: Any) -> Any:
    """The default of a parameter that is an option. help: a noun phrase with its unit. details: of typer.Option."""
    return typer.Option(default, *flags, help=help, **details)


IndexArg = Annotated[str, typer.Argument(help="Index: a folder, or a name in indexes/.")]
IndexOpt = Annotated[
    str,
    typer.Option(
        "--index",
        "-i",
        help="Index: a folder, a name in indexes/, or a published collection such as kdn:https://HOST/NAME.",
    ),
]
RayOpt = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Address of the Ray cluster, such as auto or HOST:6379. [default: RAY_ADDRESS, or a new "
        "cluster on this machine that ends with the command]",
    ),
]
MANY = "TEXT..."  # metavar of an option with several values
JSON = typer.Option("--json", help="Print one JSON object and nothing else.")
JsonOpt = Annotated[bool, JSON]
Command = Callable[..., Output | None]


def _help_all(context: typer.Context, asked: bool | None) -> None:
    """Print the help with the options that --help leaves out, and exit."""
    if asked:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


HELP_ALL = typer.Option("--help-all", is_eager=True, callback=_help_all, help="Show all options and exit.")
FLAGS = {  # options that are not named after their setting's last part
    "model.name": "model",
    "store.location": "store",
    "requests.chunks": "request_chunks",
    "requests.number": "requests",
}
VERBATIM = ("decode.stop",)  # options whose texts may hold commas
Load = Callable[[Path | None, Sequence[str]], Settings]
CONFIG = typer.Option("--config", "-c", help="YAML file with settings.")
SET = typer.Option(
    "--set",
    metavar="NAME=VALUE",
    help="Any setting by its dotted name, such as store.cap_gb=8; overrides the file and the environment. Repeatable.",
)


def split_list(text: str) -> list[str]:
    """Split at commas, except those within brackets."""
    return [word.strip() for word in re.split(r",(?![^\[]*\])", text) if word.strip()]


def make_app(help: str | None = None, add_completion: bool = False) -> typer.Typer:
    """A group of commands, or a single one. Help is plain text: brackets are printed as they are.

    add_completion: the options that install and print a shell's completion, for the whole command line.
    """
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    if help is not None:  # else it is a docstring's
        app.info.help = help
    return app


def single_command(function: Callable[..., None]) -> typer.Typer:
    """A command that is no group."""
    app = make_app()
    app.command()(function)
    return app


class Options:
    """The options that make one settings object."""

    def __init__(
        self, base: Settings, *paths: str, load: Load | None = None, names: Mapping[str, str] = FLAGS
    ) -> None:
        """paths: dotted fields of `base`, whose values are the defaults; none = all, its own class's first.

        load: reads the file of --config and the words of --set; None = no such options. names: path -> option.
        """
        self._base = base
        self._load = load
        own = type(base).__annotations__
        paths = paths or tuple(sorted(type(base).model_fields, key=lambda field: field not in own))
        self._paths = {names.get(path, path.rpartition(".")[2]): path for path in paths}

    def parameters(self) -> list[inspect.Parameter]:
        """One for each option, as typer reads them."""
        options = [self._parameter(name, path) for name, path in self._paths.items()]
        if self._load:
            options = [_parameter("config", Path, CONFIG), _parameter("set", list[str], SET), *options]
        if any(option.annotation.__metadata__[0].hidden for option in options):
            options.append(_parameter("help_all", bool, HELP_ALL))
        return options

    def make(self, given: dict[str, Any]) -> Settings:
        """The settings; takes its options out of `given`. Raises ConfigError."""
        section = self._load(given.pop("config"), given.pop("set") or ()) if self._load else self._base
        given.pop("help_all", None)
        for name, path in self._paths.items():
            value = given.pop(name)
            if isinstance(value, list) and path not in VERBATIM:
                value = [word for text in value for word in split_list(text)]
            if value not in (None, []):
                section = section.replace(path, value)
        return section

    def _parameter(self, name: str, path: str) -> inspect.Parameter:
        section, _, field = path.rpartition(".")
        owner: Any = reduce(getattr, section.split("."), self._base) if section else self._base
        info = type(owner).model_fields[field]
        kind = _kind(info.annotation)
        value = getattr(owner, field)
        is_flag = kind is bool and not (value or self._load)  # else --no-... can switch off what was on
        words = [type(owner).description(field)]
        if choices := choices_of(info):
            words.append(f"One of {', '.join(choices)}.")
        if kind == list[str]:
            words.append("Repeatable." if path in VERBATIM else "Separate several with commas.")
        if shown(value) and not is_flag:
            words.append(f"[default: {shown(value)}]")
        flags = (f"--{name.replace('_', '-')}",) if is_flag else ()
        hidden = self._load is not None and path.replace("deliver.", "serve.") not in BASIC
        metavar = MANY if kind == list[str] else None
        return _parameter(
            name, kind, typer.Option(*flags, help=" ".join(words), hidden=hidden, metavar=metavar)
        )


def with_options(**groups: Options) -> Callable[[Command], Callable[..., None]]:
    """Replace these parameters of a command by their options. A command that returns an Output also gets --json."""

    def wrap(command: Command) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        shown: list[inspect.Parameter] = []
        for name, parameter in own.parameters.items():
            parts = groups[name].parameters() if name in groups else [parameter]
            shown += [part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in parts]
        has_output = own.return_annotation is Output
        if has_output:
            shown.append(_parameter("json", bool, JSON))

        @wraps(command)
        def run(**given: Any) -> None:
            json = given.pop("json") if has_output else False
            made = {name: group.make(given) for name, group in groups.items()}
            if output := command(**given, **made):
                output.print(bool(json))
                raise typer.Exit(output.exit_code)

        del run.__wrapped__  # typer would look through it
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return run

    return wrap


def with_settings(*paths: str) -> Callable[[Command], Callable[..., None]]:
    """Replace the parameter `settings` of a command by options for these settings, --config and --set."""
    return with_options(settings=Options(Config(), *paths, load=Config.load))


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that a field takes, if it takes only some: a registry's, or those of its type."""
    for check in field.metadata:
        owner = getattr(getattr(check, "func", None), "__self__", None)
        if isinstance(owner, Registry):
            return owner.offered
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def shown(value: Any) -> str:
    """A default as one would write it on the command line; "" for none."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    values = value if isinstance(value, tuple) else (value,)
    return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in values)


def _kind(annotation: Any) -> Any:
    """How a field's type is written on the command line: what takes several types is a word."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin in (Union, UnionType):
        kinds = {_kind(part) for part in parts if part is not type(None)}
        return kinds.pop() if len(kinds) == 1 else str
    if origin is tuple:
        return list[str]
    return annotation if annotation in (bool, int, float, Path) else str
