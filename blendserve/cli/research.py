"""`blendserve evaluate`, `simulate`, `cost` and `doctor`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer

from blendserve import console
from blendserve.cli.options import (
    JsonOpt,
    Options,
    option,
    single_command,
    split_list,
    with_options,
    with_settings,
)
from blendserve.config import Config
from blendserve.console import Output
from blendserve.cost import CLAIM, CostConfig, report, with_bench, with_store
from blendserve.evaluate.config import EvaluateConfig, settings_from
from blendserve.paths import check_output, check_output_folder, index_folder
from blendserve.simulate.config import SimulateConfig
from blendserve.threads import SETTLED

log = logging.getLogger(__name__)


@single_command
@with_options(
    plan=Options(EvaluateConfig()),
    settings=Options(
        settings_from(),
        *("model.name", "store.location"),
        load=settings_from,
    ),
)
def evaluate(
    plan: EvaluateConfig,
    settings: Config,
    name: str | None = option(None, "Name of the run. [default: made of the data set and the setting]"),
    runs: Path = option(Path("runs"), "Folder for runs."),
) -> Output:
    """Compare methods on the questions of one or several data sets.

    The command prints fidelity to full prefill, scores against the labels, and times, and writes a report. Several data
    sets, separated by commas, make one table. All runs share one store unless --store names another. Run a stopped
    command again to resume it.
    """
    check_output_folder(runs)
    from blendserve.evaluate import job, report  # torch and all the rest: seconds

    datasets = split_list(plan.dataset)
    try:
        if len(datasets) > 1:
            several = job.evaluate_each(datasets, plan, settings, runs)
            found = {d: one if isinstance(one, str) else one.metrics for d, one in several.items()}
            return Output(found, lambda: report.show_all(found))
        done = job.evaluate(plan, settings, name, runs)
        show = partial(report.show, done.metrics, done.folder / "report.html")
        return Output({"folder": str(done.folder), **done.metrics}, show)
    except KeyboardInterrupt:
        log.info("stopped: predictions are saved; run the same command to resume")
        raise typer.Exit(130) from None


@single_command
@with_options(
    config=Options(
        SimulateConfig(),
        *("nodes", "routing", "seed", "requests.number", "requests.rate", "requests.chunks"),
        *("corpus.chunks", "corpus.zipf", "corpus.coherence", "corpus.lifetime", "tiers.memory_bytes"),
        *("links.store_rate", "compute.ratio"),
        load=SimulateConfig.load,
    )
)
def simulate(
    config: SimulateConfig,
    measure: Path | None = option(
        None,
        "Measure the compute times of this machine, write settings to this file, and exit.",
        callback=check_output,
    ),
    plot: Path | None = option(
        None, "SVG file for a plot of TTFT and hit rate against the number of nodes.", callback=check_output
    ),
    valkey: str | None = option(None, "URL of a Valkey server, with which --measure also measures fetching."),
    json: JsonOpt = False,
) -> None:
    """Simulate a cluster under several routing methods.

    The simulated nodes have cache tiers over a shared store, a corpus with Zipf popularity, and Poisson arrivals. The
    command prints hit rates by tier, TTFT, throughput and bytes moved. The files in configs/simulate have the costs of
    machines:

    \b
        blendserve simulate --nodes 1,2,4,8,16 --plot nodes.svg
        blendserve simulate -c configs/simulate/h100_8b.yaml --routing round_robin,chunks
        blendserve simulate -c configs/simulate/h100_8b.yaml --nodes 10000 --requests 1000000 --chunks 1000000000
        blendserve simulate --measure here.yaml && blendserve simulate -c here.yaml
    """
    if measure is not None:
        from blendserve.simulate.calibrate import calibrate  # torch: seconds

        links = "" if valkey else "; links are not measured without --valkey"
        log.info("Measuring (about half a minute)%s", links)
        measure.write_text(calibrate(config, valkey))
        log.info("wrote %s", measure)
        return
    from blendserve.simulate.metrics import plot as draw  # torch: seconds
    from blendserve.simulate.metrics import show
    from blendserve.simulate.metrics import simulate as run

    with console.progress("Simulating", "requests") as update:
        figures = run(config, update)
    Output(figures, lambda: show(figures)).print(json)
    if plot:
        plot.write_bytes(draw(figures))


@single_command
@with_options(
    config=Options(
        CostConfig(),
        *("machine_hour", "prefill_seconds", "load_seconds", "ratio", "chunk_tokens", "tokens"),
        *("reuses", "months"),
        load=CostConfig.load,
    )
)
def cost(
    config: CostConfig,
    prices: Path | None = option(
        None, "YAML file with machine_hour and tiers, which replace those of --config."
    ),
    index: str | None = option(
        None, "Index whose store adds a level with its bytes per token.", "--index", "-i"
    ),
    bench: Path | None = option(
        None, "Output of `blendserve bench codec --json`, which sets the levels and the prefill time."
    ),
) -> Output:
    """Compare the costs of storing and recomputing KV.

    For each level of each codec in each place, the command prints the break-even number of reuses per month, and the
    savings of a workload. It names missing numbers and never guesses them. Copy configs/cost/prices.yaml and enter your
    prices:

    \b
        blendserve cost -c configs/cost/h100_8b.yaml --prices configs/cost/prices.yaml --reuses 30
        blendserve bench codec --json > codec.json
        blendserve cost -c configs/cost/smollm_cpu.yaml --prices configs/cost/prices.yaml --bench codec.json
    """
    if prices is not None:
        given = CostConfig.load(prices).model_dump(
            include={"currency", "machine_hour", "tiers"}, exclude_unset=True
        )
        config = config.with_values(**given)
    if bench is not None:
        config = with_bench(config, bench)
    if index is not None:
        from blendserve.fetch import open_store  # torch: a second

        with open_store(Config().store, index_folder(index) / "kv", read_only=True, persistent=True) as store:
            config = with_store(config, store)
    found = report(config)
    return Output(found, lambda: _show_costs(found))


def _show_costs(found: dict[str, Any]) -> None:
    settings = found["settings"]
    columns = {  # title -> field of a verdict, its factor
        "a month": ("hold", 1e6),
        "a reuse": ("reuse", 1e6),
        "recomputed": ("recompute", 1e6),
        "break-even": ("break_even", 1.0),
        "times cheaper": ("times_cheaper", 1.0),
        f"{CLAIM:g} times at": ("claim_at", 1.0),
        "saves a month": ("savings", 1.0),
    }
    console.table(
        f"{settings['tokens']:,.0f} tokens, each used {settings['reuses']:g} times a month for {settings['months']:g} "
        f"months; {settings['ratio']:.0%} recomputed.\nPrices in {settings['currency']} per million tokens: stored for "
        "a month, reused once, recomputed once. Reuses per month at break-even, and where storing alone is "
        f"{CLAIM:g} times cheaper",
        ("place, level", *columns),
        [
            (f"{v['tier']}, {v['level']}", *(_number(v[field], per) for field, per in columns.values()))
            for v in found["verdicts"]
            if not v["missing"]
        ],
    )
    for tier, level in found["keep"].items():
        console.out.print(f"{tier}: {'store ' + level if level else 'recompute'}", markup=False)
    if found["missing"]:
        console.out.print(
            f"skipped, because numbers are missing: {', '.join(found['missing'])}", markup=False
        )


def _number(value: float | str, factor: float) -> str:
    if isinstance(value, str):
        return value
    value *= factor
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


EXACT = ("full prefill", "cached prefix", "first cached chunk", "every chunk at ratio 1.0", "decoding")
APPROXIMATE = ("later cached chunks at a ratio below 1.0",)
APPROXIMATE_STATES = ("later cached chunks, which are reused whole but for their first tokens",)
OWN_FORWARD = ("full prefill by the model's own forward",)


@single_command
@with_settings("model.name")
def doctor(settings: Config) -> Output:
    """Check that blending is correct with a model on this machine.

    The checks run on the model's real weights. The command also measures the costs that method auto uses, and prints
    the KV bytes per token and the kernels in use. The exit code is 1 if a check fails.
    """
    from blendserve.blend.cost import calibrated  # with torch: seconds
    from blendserve.engine.batch_engine import plan_memory
    from blendserve.engine.gate import check
    from blendserve.engine.prompt import PromptBuilder
    from blendserve.kernels import autotune
    from blendserve.kernels.cpu.isa import LEVELS
    from blendserve.kernels.selfcheck import cpu_status
    from blendserve.models.loader import load_model
    from blendserve.models.memory import available_on
    from blendserve.models.runner import native_decoder
    from blendserve.provenance import machine

    model = load_model(settings.model)
    decoder = model.decoder
    checks = check(model)
    prompts = PromptBuilder(model.tokenizer, settings.prompt)
    costs = calibrated(decoder, model.fingerprint, fresh=True)
    plan = plan_memory(model, settings.serve, settings.store)
    native, decoding = native_decoder(decoder)
    how = "by a CUDA graph" if decoder.device.type == "cuda" else f"layer by layer ({decoding})"
    found = {
        **checks.to_dict(),
        "exact": EXACT if checks.passed else OWN_FORWARD,
        "approximate": (APPROXIMATE_STATES if decoder.recurrent else APPROXIMATE) if checks.passed else (),
        "kv_bytes_per_token": decoder.kv_bytes_per_token,
        "kv_layers": decoder.kv_layers,
        "context_tokens": decoder.context_limit,
        "memory": {**asdict(plan), "available": available_on(decoder.device)},
        "template_date": settings.prompt.date if prompts.writes_date else None,
        "seconds": asdict(costs),
        "kernels": {
            "compiled": {name: asdict(cpu_status(level)) for name, level in LEVELS.items()},
            "attention": list(decoder.attention_backends),
            "decoding": decoding if native else how,
            "measured": [asdict(row) for row in autotune.results()],
        },
        "threads": asdict(SETTLED),
        "machine": machine(),
    }
    where = f"{decoder.device}, {str(decoder.dtype).removeprefix('torch.')}"
    show = partial(_show_health, f"{model.name} on {where}", checks, found)
    return Output(found, show, int(not checks.passed))


def _about_memory(found: dict[str, int]) -> str:
    from blendserve.models.memory import MemoryPlan

    plan = MemoryPlan(**{name: n for name, n in found.items() if name != "available"})
    return f"{plan}; {found['available'] / 10**6:,.0f} MB are available beside the weights"


def _about_date(date: str | None) -> str:
    return f"this template writes the date: {date} (prompt.date) for chunk KV" if date else "writes no date"


def _show_health(title: str, checks: Any, found: dict[str, Any]) -> None:
    from blendserve.kernels import autotune
    from blendserve.kernels.cpu.isa import LEVELS
    from blendserve.kernels.selfcheck import cpu_status
    from blendserve.models import thread_tuner
    from blendserve.provenance import describe

    rows = [
        (
            r.check,
            f"{r.value:.2g}",
            f"{'>=' if r.above else '<='} {r.bound:.2g}",
            "ok" if r.passed else "FAILED",
        )
        for r in checks.rows
    ]
    console.table(title, ("check", "measured", "bound", ""), rows)
    costs = found["seconds"]
    kernels = found["kernels"]
    together, anywhere = kernels["attention"]
    lines = [
        "blending is correct with this model" if checks.passed else f"cannot blend: {checks.failure}",
        f"exact: {', '.join(found['exact'])}",
        f"approximate: {', '.join(found['approximate']) or 'nothing'}",
        f"kv bytes per token: {found['kv_bytes_per_token']:,} ({found['kv_layers']})",
        f"context tokens: {found['context_tokens']:,}",
        f"memory of a server: {_about_memory(found['memory'])}",
        f"chat template: {_about_date(found['template_date'])}",
        f"costs for method auto: {costs['per_row'] * 1e3:.3g} ms per computed token, "
        f"{costs['per_loaded'] * 1e6:.3g} us per loaded token, {costs['per_pair'] * 1e9:.3g} ns per attention pair, "
        f"{costs['per_pass'] * 1e3:.3g} ms per pass",
        f"this machine: {describe(found['machine'])}",
        *(f"kernels for {v.title} ({v.dtype}): {cpu_status(v).reason}" for v in LEVELS.values()),
        f"threads: {SETTLED}; {thread_tuner.RULE}",
        f"decoding: {kernels['decoding']}",
        f"attention: {together} for contiguous rows, {anywhere} for others",
    ]
    console.out.print("\n".join(lines), markup=False)
    tuned = [(r.operation, r.shapes, *r.cells()) for r in autotune.results()]
    columns = ("operation", "shapes", "kernel", "ms", "")
    if tuned:  # on a CPU
        console.table("kernels in use", columns, tuned)
