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
EXACT = ("full prefill", "cached prefix", "first cached chunk", "every chunk at ratio 1.0", "decoding")
APPROXIMATE = ("later cached chunks at a ratio below 1.0",)
OWN_FORWARD = ("full prefill by the model's own forward",)


@app.command()
@with_options(settings=Options(Config(), "model.name", load=Config.load))
def doctor(settings: Config, json: JsonOpt = False) -> None:
    """Check that blending is correct with a model on this machine.

    The checks run on the model's real weights. The command also measures the costs that method auto decides by, and
    shows the kernels in use. The exit code is 1 if a check fails.
    """
    from blendserve.blend.cost import calibrated  # with torch: seconds
    from blendserve.engine.gate import check
    from blendserve.kernels import ops
    from blendserve.kernels.cpu.isa import LEVELS
    from blendserve.kernels.selfcheck import cpu_status
    from blendserve.models import threads
    from blendserve.models.loader import load_model
    from blendserve.models.native import native_decoder
    from blendserve.paths import cache_folder
    from blendserve.provenance import describe, machine

    reader = load_model(settings.model)
    report = check(reader)
    costs = calibrated(reader.adapter, reader.fingerprint, cache_folder() / "profit", fresh=True)
    together, anywhere = reader.adapter.attention_backends
    here = machine()
    facts = {
        "exact": EXACT if report.passed else OWN_FORWARD,
        "approximate": APPROXIMATE if report.passed else (),
        "kv_bytes_per_token": reader.adapter.kv_bytes_per_token,
        "context_tokens": reader.adapter.context_limit,
    }
    decoder, decoding = native_decoder(reader.adapter)
    decoding = decoding if decoder else f"layer by layer ({decoding})"
    if json:
        compiled = {name: as_dict(cpu_status(level)) for name, level in LEVELS.items()}
        tuned = [as_dict(row) for row in ops.tuning_results()]
        kernels = {
            "compiled": compiled,
            "attention": [together, anywhere],
            "decoding": decoding,
            "measured": tuned,
        }
        found = {
            **report.to_dict(),
            **facts,
            "seconds": as_dict(costs),
            "kernels": kernels,
            "threads": as_dict(SETTLED),
            "machine": here,
        }
        console.print_json(found)
    else:
        where = f"{reader.adapter.device}, {str(reader.adapter.dtype).removeprefix('torch.')}"
        rows = [_row(row) for row in report.rows]
        console.table(f"{reader.name} on {where}", ("check", "measured", "bound", ""), rows)
        console.out.print(
            "blending is correct with this model" if report.passed else f"cannot blend: {report.failure}"
        )
        for name, fact in facts.items():
            shown = f"{fact:,}" if isinstance(fact, int) else ", ".join(fact) or "nothing"
            console.out.print(f"{name.replace('_', ' ')}: {shown}")
        console.out.print(
            f"costs for method auto: {costs.per_row * 1e3:.3g} ms per computed token, "
            f"{costs.per_loaded * 1e6:.3g} us per loaded token, {costs.per_pair * 1e9:.3g} ns per attention pair, "
            f"{costs.per_pass * 1e3:.3g} ms per pass"
        )
        console.out.print(f"this machine: {describe(here)}", markup=False)
        for level in LEVELS.values():
            console.out.print(f"kernels for {level.title} ({level.dtype}): {cpu_status(level).reason}")
        console.out.print(f"threads: {SETTLED}; {threads.RULE}", markup=False)
        console.table(
            "kernels in use", ("operation", "shapes", "kernel", "ms", ""), _tuned(ops.tuning_results())
        )
        console.out.print(f"decoding: {decoding}", markup=False)
        console.out.print(f"attention: {together} for contiguous rows, {anywhere} for others")
    if not report.passed:
        raise typer.Exit(1)


def _tuned(rows: Iterable[Any]) -> list[tuple[str, ...]]:
    """Table rows; each class of shapes is named once. On a GPU, or with the switch off, nothing is measured."""
    named, before = [], None
    for row in rows:
        shapes = row.operation, row.shapes
        named.append((*(("", "") if shapes == before else shapes), *row.cells()))
        before = shapes
    return named or [("nothing was measured", "", "", "", "")]


def _row(row: Any) -> tuple[str, ...]:
    wanted = f"{'>=' if row.above else '<='} {row.bound:.2g}"
    return row.check, f"{row.value:.2g}", wanted, "ok" if row.passed else "FAILED"
