"""`blendserve bench NAME`: prints a table, and the result as one JSON object on the last line of stdout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from blendserve import console
from blendserve.bench.harness import render
from blendserve.bench.runner import BENCHES, BenchConfig, load_bench, run_bench
from blendserve.cli.options import Options, make_app, option, split_list, with_options
from blendserve.paths import check_output, check_output_folder
from blendserve.provenance import describe

OutOpt = Annotated[
    Path | None,
    typer.Option(help="File for the samples. The same command resumes it.", callback=check_output),
]
PlotOpt = Annotated[Path | None, typer.Option(help="SVG file for a plot.", callback=check_output)]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print only the JSON object, without tables.")]


def bench_app(help: str, benches: Mapping[str, str], package: str = "") -> typer.Typer:
    """A command for each bench of the table: its options are the fields of its config."""

    class Benches(TyperGroup):
        """Imports a bench on first use; its help does not import it."""

        def list_commands(self, ctx: Any) -> list[str]:
            return [*benches, *super().list_commands(ctx)]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in benches:
                return _command(cmd_name, benches[cmd_name], package)
            return super().get_command(ctx, cmd_name)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            more = ((name, self.commands[name].get_short_help_str()) for name in self.commands)
            with formatter.section("Commands"):
                formatter.write_dl([*benches.items(), *more])

    app = make_app(help)
    app.callback(cls=Benches, help=help)(lambda: None)
    return app


def _command(name: str, help: str, package: str) -> Any:
    bench = load_bench(package + name)
    app = make_app()

    @app.command(name, help=help)
    @with_options(config=Options(bench.config(), names={"ratios": "ratio"}))
    def run(config: BenchConfig, out: OutOpt = None, plot: PlotOpt = None, json: JsonOpt = False) -> None:
        with console.progress("Measuring", "rounds") as update:
            result = run_bench(package + name, config, out, update)
        if plot and bench.plot:
            plot.write_bytes(bench.plot.draw(result))
        if not json:
            for title, columns, rows in render(bench.tables, result):
                console.table(title, columns, rows)
            console.out.print(f"measured on {describe(result['environment']['machine'])}", markup=False)
        console.print_json(result)

    return typer.main.get_command(app)


def _suite(
    file: Annotated[Path, typer.Argument(help="YAML file of runs and claims.")],
    out: Annotated[Path, typer.Option(help="Folder for results. Runs with a result are skipped.")],
    minutes: float = option(120.0, "Time limit after which no further run starts, in minutes."),
    only: str = option("", "Names of the runs, separated by commas; all if not set."),
    set_: list[str] = option([], "Value of $NAME in the suite. Repeatable.", "--set", metavar="NAME=VALUE"),
    dry_run: bool = option(False, "Run everything at its smallest, on a CPU.", "--dry-run"),
) -> None:
    """Run a list of benches in order, and check their claims.

    A run starts only if its minutes are left. After a failed run, the others continue. The exit code is 1 if a run
    failed or a target was missed.
    """
    from blendserve.bench.suite import Suite, run_suite  # torch and all the rest: seconds

    variables = dict(word.partition("=")[::2] for word in set_)
    suite = Suite.read(file, variables)
    check_output_folder(out)
    states = run_suite(suite, out, minutes, split_list(only), dry_run)
    verdicts = [] if dry_run else list(suite.verdicts(out))
    if verdicts:
        shown = [
            "not measured" if v is None else f"{v.value:.2f} ({v.low:.2f}-{v.high:.2f})" for _, v in verdicts
        ]
        rows = [(claim.says, claim.target, text) for (claim, _), text in zip(verdicts, shown, strict=True)]
        console.table("Claims", ("claim", "target", "measured"), rows)
    console.print_json(states)
    failed = [name for name, state in states.items() if state != "done" and not state.startswith("skipped")]
    raise typer.Exit(int(bool(failed) or any(v is not None and not v.met for _, v in verdicts)))


bench = bench_app("Measure speed on this machine, against transformers and hardware limits.", BENCHES)
bench.command("suite")(_suite)
