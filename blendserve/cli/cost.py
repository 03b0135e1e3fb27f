"""`blendserve cost`: storing KV against recomputing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blendserve import console
from blendserve.cli.options import JsonOpt, Options, make_app, with_options
from blendserve.config import Config, changed
from blendserve.cost import CLAIM, CostConfig, report, with_bench, with_store

app = make_app()


@app.command()
@with_options(
    config=Options(
        CostConfig(),
        *(
            "machine_hour",
            "prefill_seconds",
            "load_seconds",
            "ratio",
            "chunk_tokens",
            "tokens",
            "reuses",
            "months",
        ),
        load=CostConfig.load,
    )
)
def cost(
    config: CostConfig,
    prices: Annotated[
        Path | None,
        typer.Option(help="YAML file with machine_hour and tiers; they replace those of --config."),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index", "-i", help="Index whose store is measured; adds a level with its bytes per token."
        ),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(help="Output of `blendserve bench codec --json`; sets the levels and the prefill time."),
    ] = None,
    json: JsonOpt = False,
) -> None:
    """Compare the costs of storing and recomputing KV.

    For each level of each codec in each place: break-even reuses per month, and the savings of a workload. Missing
    numbers are named, never guessed. Prices are your own: copy configs/cost/prices.yaml and edit it:

    \b
        blendserve cost -c configs/cost/h100_8b.yaml --prices configs/cost/prices.yaml --reuses 30
        blendserve bench codec --json > codec.json
        blendserve cost -c configs/cost/smollm_cpu.yaml --prices configs/cost/prices.yaml --bench codec.json
    """
    if prices is not None:
        given = CostConfig.load(prices).model_dump(
            include={"currency", "machine_hour", "tiers"}, exclude_unset=True
        )
        config = changed(config, **{name: value for name, value in given.items() if value is not None})
    if bench is not None:
        config = with_bench(config, bench)
    if index is not None:
        from blendserve.fetch import open_store  # torch: a second
        from blendserve.paths import index_folder

        with open_store(Config().store, index_folder(index) / "kv", read_only=True, persistent=True) as store:
            config = with_store(config, store)
    found = report(config)
    if json:
        console.print_json(found)
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    settings = found["settings"]
    money = settings["currency"]
    rows = [_row(verdict) for verdict in found["verdicts"] if not verdict["missing"]]
    console.table(
        f"{settings['tokens']:,.0f} tokens, each used {settings['reuses']:g} times a month for {settings['months']:g} "
        f"months; {settings['ratio']:.0%} recomputed.\nPrices in {money} per million tokens: stored for a month, reused "
        f"once, recomputed once. Reuses per month at break-even, and where storing alone is {CLAIM:g} times cheaper",
        (
            *("place, level", "a month", "a reuse", "recomputed"),
            *("break-even", "times cheaper", f"{CLAIM:g} times at", "saves a month"),
        ),
        rows,
    )
    for tier, level in found["keep"].items():
        console.out.print(f"{tier}: {'store ' + level if level else 'recompute'}", markup=False)
    if found["missing"]:
        console.out.print(f"left out, numbers missing: {', '.join(found['missing'])}", markup=False)


def _row(verdict: dict[str, Any]) -> list[str]:
    def number(name: str, per: float = 1.0) -> str:
        value = verdict[name]
        return (
            value
            if isinstance(value, str)
            else f"{value * per:,.3g}"
            if abs(value * per) < 1000
            else f"{value * per:,.0f}"
        )

    million = 1e6
    return [
        f"{verdict['tier']}, {verdict['level']}",
        number("hold", million),
        number("reuse", million),
        number("recompute", million),
        number("break_even"),
        number("times_cheaper"),
        number("claim_at"),
        number("savings"),
    ]
