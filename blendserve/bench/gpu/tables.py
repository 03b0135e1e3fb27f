"""The GPU bench's figures as a person reads them."""

from __future__ import annotations

from blendserve.bench.figures import Figures
from blendserve.bench.gpu import decoding
from blendserve.bench.tables import Table, ms, plain


def tables(figures: Figures) -> list[Table]:
    """Agreement, kernels, and last the prefills."""
    return [_agreement(figures), _waits(figures), _attention(figures), _decoding(figures), _prefills(figures)]


def _agreement(figures: Figures) -> Table:
    rows = [
        (f"{kernel['heads']}: {way}", f"{off:.2g}", f"{kernel['bound']:.2g}", _said(off < kernel["bound"]))
        for kernel in figures["kernels"]
        for way, off in kernel["off"].items()
    ]
    for reader in figures["readers"]:
        for name, method in reader["methods"].items():
            fp32, bf16, cpu = (_furthest(method[kind]) for kind in ("fp32", "bf16", "bf16 on the CPU"))
            rows.append((f"{reader['model']}: {name}, fp32", fp32, "", _said(method["ok"])))
            rows.append((f"{reader['model']}: {name}, bf16", bf16, f"{cpu} on the CPU", ""))
    return (
        "Right? Largest differences to the formula, and to fp32 on the CPU",
        ("", "off by", "bound", ""),
        rows,
    )


def _said(ok: bool) -> str:
    return "ok" if ok else "WRONG"


def _furthest(off: Figures) -> str:
    return f"{max(off['logits'], off['keys'], off['values']):.2g}"


def _waits(figures: Figures) -> Table:
    rows = [
        (name, place, str(times))
        for name, places in figures["waits"].items()
        for place, times in places.items()
    ]
    return "Where the host waited for the device within one prefill", ("method", "place", "times"), rows


def _attention(figures: Figures) -> Table:
    rows = [
        (
            f"{cell['context']:,} tokens, {cell['heads']}",
            name,
            f"{seconds * 1e6:,.0f}",
            f"{cell['share_of_flops'][name]:.0%}",
            f"{cell['faster_than_masked_sdpa']:.2f}"
            if name.startswith("rows") and "SDPA" not in name
            else "",
        )
        for cell in figures["attention"]
        for name, seconds in cell["seconds"].items()
    ]
    columns = ("", "", "us", "of the matmul rate", "x faster than masked SDPA")
    return "Attention alone, one layer: 15% of the rows, and all of them", columns, rows


def _decoding(figures: Figures) -> Table:
    rows = [
        (
            f"{d['model']}, {d['context']:,} tokens",
            name,
            ms(seconds),
            f"{d['limit'] / seconds['median']:.0%}",
            f"{d['off']:.1g}" if name == decoding.REPLAYED else "",
        )
        for d in figures["decoding"]
        for name, seconds in d["seconds_per_token"].items()
    ]
    return "Decoding", ("", "", "ms a token", "of the limit", "logits off by"), rows


def _prefills(figures: Figures) -> Table:
    rows = [
        (
            cell["model"],
            f"{cell['context']:,}",
            cell["source"],
            name,
            ms(method["seconds"]),
            plain(method["faster_than_full"]),
            f"{method['queued'] / method['seconds']['median']:.0%}",
            f"{method['share_of_limit']:.0%}" if "share_of_limit" in method else "",
        )
        for cell in figures["cells"]
        for name, method in cell["methods"].items()
    ]
    columns = (
        "model",
        "context",
        "KV in",
        "method",
        "TTFT ms",
        "x faster than full",
        "queued by",
        "of the limit",
    )
    device, left = figures["device"]["name"], len(figures["left_out"])
    remark = f"; {left} steps left out for want of time" if left else ""
    failed = f"; {len(figures['failed'])} steps FAILED" if figures["failed"] else ""
    return f"Time to first token on {device}{remark}{failed}", columns, rows
