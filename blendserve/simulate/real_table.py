"""The check against real engines, as a table."""

from __future__ import annotations

from typing import Any

from blendserve import console
from blendserve.simulate.cluster import TIERS


def show(figures: dict[str, Any]) -> None:
    """Three lines for each run: real, simulated with its error, and simulated as if nodes had a machine each."""
    settings = figures["settings"]
    rows: list[list[str]] = []
    for run in figures["runs"]:
        slower = " ".join(f"{times:.2f}" for times in run["slowdown"])
        for which in ("real", "simulated", "apart"):
            found, off = run[which], run.get(f"error_{which}")
            rows.append(
                [
                    f"{run['store']} {run['routing']}, {which}{f', {slower}' if which == 'simulated' else ''}",
                    f"{run['waited']:.0%}" if which == "real" else "",
                    "  ".join(f"{found['hit_rates'][tier]:.2f}" for tier in TIERS),
                    *(
                        _number(found["ttft"][name] * 1e3, off and off["ttft"][name])
                        for name in ("mean", "p50", "p95")
                    ),
                    _number(found["throughput"], off and off["throughput"], 2),
                ]
            )
    console.table(
        f"{settings['nodes']} engine processes of {settings['model']}, {settings['requests']} requests a run; "
        f"load average {figures['load_average'][0]:.1f}",
        ("run", "waited", "memory disk store none", "TTFT ms", "p50", "p95", "requests a second"),
        rows,
    )

    console.out.print(
        "simulated: with how many times as long work takes while 1, 2, ... nodes compute; apart: without"
    )
    for store, alone in figures["alone"].items():
        ttft = f"{alone['ttft_real'] * 1e3:.1f} ms, simulated {alone['ttft_simulated'] * 1e3:.1f}"
        console.out.print(
            f"one node, one by one, {store} store, least of some repeats: {alone['same_places']:.0%} of "
            f"{alone['requests']} requests find chunks in the same places; TTFT {ttft} ({alone['error_of_mean']:+.0%}); "
            f"a request is off by {alone['error_of_a_request']:.0%}; with what follows {alone['error_of_whole']:+.0%}"
        )


def _number(value: float, error: float | None, digits: int = 0) -> str:
    return f"{value:,.{digits}f}" if error is None else f"{value:,.{digits}f} ({error:+.0%})"
