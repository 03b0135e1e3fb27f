"""`blendserve doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from blendserve import console
from blendserve.cli.options import JsonOpt, Options, make_app, with_options
from blendserve.cli.show import as_dict
from blendserve.config import Config
from blendserve.threads import SETTLED

app = make_app()


@app.command()
@with_options(settings=Options(Config(), "reader.model", load=Config.load))
def doctor(settings: Config, json: JsonOpt = False) -> None:
    """Check that blending is right with a reader, here.

    The checks run on the reader's real weights. The costs that method auto reckons with are measured anew, too, and what
    computes on this machine is named. The exit code is 1 if blending is not right.
    """
    from blendserve.blend.cost import calibrated  # with torch: seconds
    from blendserve.engine.gate import check
    from blendserve.kernels import ops
    from blendserve.kernels.cpu.isa import LEVELS
    from blendserve.kernels.verify import cpu_status
    from blendserve.models import pace
    from blendserve.models.loader import load_reader
    from blendserve.paths import cache_folder
    from blendserve.provenance import describe, machine

    reader = load_reader(settings.reader, console.say)
    report = check(reader)
    costs = calibrated(reader.adapter, reader.fingerprint, cache_folder() / "profit", console.say, fresh=True)
    together, anywhere = reader.adapter.attention_backends
    here = machine()
    if json:
        compiled = {name: as_dict(cpu_status(level)) for name, level in LEVELS.items()}
        raced = [as_dict(row) for row in ops.measured()]
        kernels = {"compiled": compiled, "attention": [together, anywhere], "measured": raced}
        found = {
            **report.to_dict(),
            "seconds": as_dict(costs),
            "kernels": kernels,
            "threads": as_dict(SETTLED),
            "machine": here,
        }
        console.print_json(found)
    else:
        where = f"{reader.adapter.device}, {str(reader.adapter.dtype).removeprefix('torch.')}"
        rows = [_row(row) for row in report.rows]
        console.table(f"{reader.name} on {where}", ("check", "measured", "wanted", ""), rows)
        console.out.print(
            "blending is right on this reader" if report.passed else f"cannot blend: {report.failure}"
        )
        console.out.print(
            f"method auto reckons with {costs.per_row * 1e3:.3g} ms a computed token, {costs.per_loaded * 1e6:.3g} us a "
            f"loaded one, {costs.per_pair * 1e9:.3g} ns a pair attended and {costs.per_pass * 1e3:.3g} ms a pass"
        )
        console.out.print(f"this machine: {describe(here)}", markup=False)
        for level in LEVELS.values():
            console.out.print(f"kernels for {level.title} ({level.dtype}): {cpu_status(level).reason}")
        console.out.print(f"threads: {SETTLED}; {pace.RULE}", markup=False)
        console.table("who computes", ("operation", "shapes", "by", "ms", ""), _raced(ops.measured()))
        console.out.print(f"attention: rows side by side by {together}, others by {anywhere}")
    if not report.passed:
        raise typer.Exit(1)


def _raced(rows: Iterable[Any]) -> list[tuple[str, ...]]:
    """Each class of shapes named once. Nothing is measured on a GPU, nor where a switch says so."""
    named, before = [], None
    for row in rows:
        shapes = row.operation, row.shapes
        named.append((*(("", "") if shapes == before else shapes), *row.cells()))
        before = shapes
    return named or [("nothing was measured", "", "", "", "")]


def _row(row: Any) -> tuple[str, ...]:
    wanted = f"{'>=' if row.above else '<='} {row.bound:.2g}"
    return row.check, f"{row.value:.2g}", wanted, "ok" if row.passed else "FAILED"
