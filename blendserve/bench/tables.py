"""Figures as a person reads them: one table a bench, medians with their spread."""

from __future__ import annotations

from collections.abc import Sequence

from blendserve.bench.figures import Figures

LIMITED = ("linear", "attention", "load")  # the stages that have a limit
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def ttft(figures: Figures) -> list[Table]:
    """Times and ratios; stages; cold starts and memory where they were measured."""
    prompt, rounds = figures["prompt"], figures["settings"]["repeats"]
    title = f"{len(prompt['chunks'])} chunks, {prompt['tokens']:,} tokens of prompt, {_reader(figures)}, {rounds} rounds"
    methods = figures["methods"]
    tables: list[Table] = [
        (
            f"{title}; ms (least-most), faster than",
            ("method", "prefill ms", "TTFT ms", "transformers", "full (ours)", "tokens run"),
            [(name, *_times(m)) for name, m in methods.items()],
        ),
        (
            "Stages, ms and share of TTFT",
            ("method", "load", "select", "correct", "MB loaded"),
            [(name, *_stages(m)) for name, m in methods.items() if "stages" in m],
        ),
    ]
    if "cold" in figures:
        tables.append(_cold(figures["cold"]))
    tables += [_throttled(part) for part in figures.get("throttled", ())]
    if "memory" in figures:
        tables.append(_memory(figures["memory"]))
    return tables


def decode(figures: Figures) -> list[Table]:
    settings = figures["settings"]
    title = f"{settings['new_tokens']} tokens behind {settings['context']:,}, {_reader(figures)}"
    rows = [(name, ms(f), _faster(name, figures)) for name, f in figures["seconds_per_token"].items()]
    return [(title, ("", "ms a token", "faster than transformers"), rows)]


def precompute(figures: Figures) -> list[Table]:
    title = (
        f"{figures['tokens']:,} tokens, {figures['bytes_stored'] / 1e6:,.0f} MB stored, {_reader(figures)}"
    )
    rate = figures["tokens_per_second"]
    rows = [(name, plain(f, "{:,.0f}"), _faster(name, figures)) for name, f in rate.items()]
    return [(title, ("", "tokens/s", "faster than transformers"), rows)]


def store(figures: Figures) -> list[Table]:
    title = f"{figures['chunks']} chunks, {figures['bytes'] / 1e6:,.0f} MB, {figures['records']:,} records"
    records = figures["records_per_second"]
    rows = [
        (name.replace("_", ", "), plain(f, "{:.2f}"), plain(records[name], "{:,.0f}"))
        for name, f in figures["gigabytes_per_second"].items()
    ]
    cold = figures["cold"]
    remark = "" if cold["done"] else f"; no cold reads: {cold['why']}"
    return [(title + remark, ("", "GB/s", "records/s"), rows)]


def codec(figures: Figures) -> list[Table]:
    rounds, found = figures["settings"]["repeats"], figures["codecs"]
    title = f"{figures['tokens']:,} tokens of chunks, {_reader(figures)}, {rounds} rounds"
    sizes = [
        (
            word,
            f"{c['smaller']:.2f}x",
            f"{c['bits_per_element']:.3f}",
            f"{c['bytes_per_token']:,.0f}",
            *(f"{size:,.0f}" for size in c["bytes_per_token_with_tables"].values()),
            f"{c['tables_bytes'] / 1e6:.2f}",
        )
        for word, c in found.items()
    ]
    speeds = [
        (
            word,
            plain(c["encode"]["raw_mb_per_second"], "{:,.0f}"),
            plain(c["decode"]["raw_mb_per_second"], "{:,.0f}"),
            plain(c["decode"]["tokens_per_second"], "{:,.0f}"),
            plain(c["decode_share_of_prefill"], "{:.3f}"),
            ms(c["ttft"]),
            plain(c["ttft_of_raw"], "{:.2f}x"),
        )
        for word, c in found.items()
    ]
    columns = (
        *("codec", "smaller", "bits an element", "bytes a token"),
        *("... 1k chunks", "... 100k chunks", "tables MB"),
    )
    return [
        (
            f"{title}: size, every byte of a record counted, then with the tables that so many chunks share",
            columns,
            sizes,
        ),
        (
            f"Speed, in MB of raw KV a second; TTFT by {figures['method']}",
            ("codec", "encode MB/s", "decode MB/s", "decode tokens/s", "of prefill", "TTFT ms", "of raw"),
            speeds,
        ),
    ]


def scaling(figures: Figures) -> list[Table]:
    """A row a cell and method: seconds, what the limit allows, and the share of it that each stage reaches."""
    columns = ("varied", "context", "chunks", "method", "TTFT ms", "limit ms", *LIMITED)
    rows = [
        (cell["varied"], *_size(cell), name, ms(method["ttft"]), *_reached(method))
        for cell in figures["cells"]
        for name, method in cell["methods"].items()
    ]
    return [("Time to first token, and the share of the limit that each stage reaches", columns, rows)]


def crowded(figures: Figures) -> list[Table]:
    """A row a process, request and figure: alone, and how many times as long in each other situation."""
    columns, rows = _situations(figures)
    found: list[Table] = [
        (
            f"Milliseconds alone (least-most), and how many times that elsewhere; {_crowd(figures)}",
            columns,
            rows,
        )
    ]
    cost = [
        (request, figure, plain(times, "{:.3f}"))
        for request, parts in figures["alone_against_libgomp"].items()
        for figure, times in parts.items()
    ]
    if cost:
        found.append(("Alone, as a multiple of libgomp left alone", ("request", "figure", "times"), cost))
    return found


def hostile(figures: Figures) -> list[Table]:
    """What ordinary clients saw in either kind of window, the target, and what the hostile client got."""
    settings, ratio = figures["settings"], figures["p95_ttft_ratio"]
    title = f"{settings['clients']} ordinary clients, {settings['rounds']} pairs of windows of {settings['seconds']:g} s"
    found = plain(ratio) if ratio else "not known"
    met = "met" if figures["passed"] else "missed"
    ordinary = [
        (
            f"{name} the hostile client",
            *(f"{w['ttft'][part] * 1e3:,.0f}" if w["ttft"] else "-" for part in ("p50", "p95", "worst")),
            f"{w['answered']}",
            f"{w['failed']}",
        )
        for name, w in figures["windows"].items()
    ]
    got = [
        (
            kind,
            *(f"{g[part] * 1e3:,.0f}" if g[part] is not None else "-" for part in ("median", "worst")),
            ", ".join(f"{n:,} x {status}" for status, n in sorted(g["statuses"].items())) or "none",
        )
        for kind, g in figures["hostile"].items()
    ]
    return [
        (
            f"{title}; p95 TTFT with / without {found}, target at most {figures['target']:g}, nobody failed: {met}",
            ("", "TTFT ms", "p95", "worst", "answered", "failed"),
            ordinary,
        ),
        ("What the hostile client got", ("request", "median ms", "worst", "statuses"), got),
    ]


def start(figures: Figures) -> list[Table]:
    """Whole processes, then the answers of one."""
    title = f"Start to exit, {_reader(figures)}, {figures['settings']['repeats']} rounds"
    first = figures["first_against_later"]
    answers = [
        (f"answer {n}", ms(ttft), plain(first) if n == 1 else "")
        for n, ttft in enumerate(figures["ttft"]["answers"], 1)
    ]
    return [
        (title, ("command", "ms"), [(name, ms(s)) for name, s in figures["processes"].items()]),
        (
            "Answers of one process, and the first against the later ones",
            ("", "TTFT ms", "times"),
            [("of `ask`", ms(figures["ttft"]["ask"]), ""), *answers],
        ),
    ]


def _situations(figures: Figures) -> tuple[Sequence[str], list[Sequence[str]]]:
    rows: list[Sequence[str]] = []
    others: list[str] = []
    for name, requests in figures["subjects"].items():
        for request, parts in requests.items():
            for figure, cells in parts.items():
                others = [situation for situation in cells if situation != "alone"]
                times = [plain(cells[situation]["times_alone"]) for situation in others]
                rows.append((name, request, figure, ms(cells["alone"]["seconds"]), *times))
    return ("threads wait as", "request", "figure", "alone ms", *others), rows


def _crowd(figures: Figures) -> str:
    machine, load = figures["machine"], figures["load_average"][0]
    return (
        f"{_reader(figures)}, {machine['cpu']}, one core by {figures['one_core_by']}, load average {load:.1f}"
    )


def _size(cell: Figures) -> tuple[str, str]:
    return f"{cell['prompt']['context']:,}", str(cell["settings"]["chunks"])


def _reached(method: Figures) -> tuple[str, ...]:
    if "against_limit" not in method:  # transformers' own
        return ("",) * (1 + len(LIMITED))
    bound = method["against_limit"]
    stages = (bound["stages"][stage]["share_of_limit"]["median"] for stage in LIMITED)
    return f"{bound['limit'] * 1e3:,.1f}", *(f"{share:.0%}" if share else "" for share in stages)


def ms(figure: Figures) -> str:
    """Seconds as milliseconds."""
    digits = 0 if figure["median"] >= 0.1 else 1
    middle, least, most = (f"{figure[part] * 1e3:,.{digits}f}" for part in ("median", "least", "most"))
    return f"{middle} ({least}-{most})"


def plain(figure: Figures, form: str = "{:.2f}") -> str:
    """A figure in its own unit."""
    middle, least, most = (form.format(figure[part]) for part in ("median", "least", "most"))
    return f"{middle} ({least}-{most})"


def _reader(figures: Figures) -> str:
    reader, threads = figures["reader"], figures["machine"]["threads"]
    return f"{reader['model']} {reader['dtype']} on {reader['device']}, {threads} threads"


def _times(method: Figures) -> tuple[str, ...]:
    faster = [f"{plain(method['faster_than'][base]['ttft'])}" for base in ("transformers", "full")]
    return ms(method["prefill"]), ms(method["ttft"]), *faster, str(method.get("tokens_run", ""))


def _stages(method: Figures) -> tuple[str, ...]:
    shown = (
        f"{s['seconds']['median'] * 1e3:.1f}  {s['share_of_ttft']['median']:.1%}"
        for s in method["stages"].values()
    )
    return *shown, f"{method['bytes_loaded'] / 1e6:,.0f}"


def _throttled(part: Figures) -> Table:
    rows = [
        (
            n,
            ms(m["ttft"]),
            ms(m["reading"]),
            plain(m["hidden"]) if "hidden" in m else "-",
            f"{m['ratio']:.2f}",
        )
        for n, m in part["methods"].items()
    ]
    columns = ("method", "TTFT ms", "reading ms", "share of it hidden", "ratio")
    return f"A store of {part['gb_per_second']:g} GB/s", columns, rows


def _cold(cold: Figures) -> Table:
    if not cold["done"]:
        return f"Cold page cache: not measured, {cold['why']}", ("method",), []
    rows = [(n, ms(m["ttft"]), plain(m["slower_than_warm"])) for n, m in cold["methods"].items()]
    return "Cold page cache", ("method", "TTFT ms", "cold / warm"), rows


def _memory(memory: dict[str, Figures]) -> Table:
    rows = [
        (name, *(f"{m[part] / 1e6:,.0f}" for part in ("peak_bytes", "kv_bytes", "above_kv_bytes")), _share(m))
        if m["done"]
        else (name, m["why"], "", "", "")
        for name, m in memory.items()
    ]
    return "Peak memory of a request, MB", ("method", "above model", "KV", "above both", "/ KV"), rows


def _share(m: Figures) -> str:
    return f"{m['above_kv_share']:.2f}"


def _faster(name: str, figures: Figures) -> str:
    return "" if name == "transformers" else plain(figures["faster_than_transformers"])
