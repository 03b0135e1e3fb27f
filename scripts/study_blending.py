"""What no setting of the product turns: enriched chunks, and other forms of CacheBlend's rule, against full prefill.

    python scripts/study_blending.py --experiment enrich --dataset questions.json
    python scripts/study_blending.py --experiment deviation --dataset musique.json --window 512 --chunks 6 --half second

enrich      Chunk KV computed behind the prefix and other chunks (akin to FusionRAG, arXiv 2601.12904), nearest last: the
            nearest in the prompt (`near_here`) or in the rest of the data (`near_elsewhere`), `random` ones of the rest,
            the bundled `primer`; against the `prefix` alone, where the first chunk is exact.
deviation   CacheBlend's rule by V, K or both, at several check layers, and with gradual filtering ([1,2,3]).

Mean KL is told as a share of full reuse's behind the prefix, and of a plain case's: the same method behind the prefix, or
V at layer 1. Kept in runs/study/<name>/predictions.jsonl as it comes: after a kill, the same command goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
import xxhash
from torch import Tensor

from blendserve import console
from blendserve.blend.assemble import Layout, lay_out
from blendserve.blend.cache import KVCache
from blendserve.blend.precompute import ChunkComputer
from blendserve.blend.prefill import Prefilled, _Run, check_policy, prefill
from blendserve.blend.rows import Rows
from blendserve.blend.select import Deviation
from blendserve.config import BlendConfig, Config, DecodeConfig, ReaderConfig, changed
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.engine.engine import Engine
from blendserve.engine.generation import generate
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import PromptTooLong
from blendserve.evaluate.answers import decisions
from blendserve.evaluate.datasets import load
from blendserve.evaluate.fidelity import forced, kl, share
from blendserve.evaluate.folder import Line, RunFolder, environment
from blendserve.evaluate.plan import PROMPT, EvaluateConfig
from blendserve.evaluate.settings import Setting, open_engine
from blendserve.evaluate.variants import variants
from blendserve.models.adapter import Adapter
from blendserve.retrieve import Embedder
from blendserve.store.memory import MemoryChunk
from blendserve.timing import Clock

ROOT = Path("runs") / "study"
SETTINGS = Config(prompt=PROMPT, decode=DecodeConfig(max_new_tokens=16), blend=BlendConfig(method="blend"))
UNIT = "none/prefix"  # full reuse
FRONTS = ("prefix", "primer", "near_here", "near_elsewhere", "random")
Front = Callable[[Prompt, int], TokenIds]  # what the prompt's i-th chunk is computed behind
PLAIN: dict[str, Front] = {"prefix": lambda prompt, i: prompt.prefix}


class Case(NamedTuple):
    """One way to blend, over chunk KV computed behind one kind of front."""

    name: str
    blend: BlendConfig
    plain: str  # the case that this one would improve on
    front: str = "prefix"
    compare: str = "v"  # by the deviation policy: "v", "k" or "kv"


def enriched() -> list[Case]:
    methods = [v for v in variants(("none", "query", "query+ridge"), (0.05, 0.15)) if v.kind == "blend"]
    return [Case(f"{v}/{front}", v.blend, f"{v}/prefix", front) for v in methods for front in FRONTS]


def compared() -> list[Case]:
    rule = BlendConfig(method="blend", policy="deviation", ratio=0.15)
    cases = [Case(UNIT, changed(rule, policy="none", correction="none"), UNIT)]
    for correction in ("none", "ridge"):
        for layers in ((1,), (2,), (4,), (8,), (1, 2, 3)):
            blend = changed(rule, correction=correction, check_layers=layers)
            at = f"[{','.join(map(str, layers))}]+{correction}"
            cases += [Case(by + at, blend, f"v[1]+{correction}", compare=by) for by in ("v", "k", "kv")]
    return cases


CASES = {"enrich": enriched, "deviation": compared}


class Comparing(Deviation):
    """Deviation of V, K or both; of both, each in units of its own, as keys are larger."""

    keys: tuple[Tensor, Tensor]  # [K, S, D] of the candidate rows, fresh and stored
    compare: str

    def narrow(self, l: int, layout: Layout, fresh: Tensor, cached: Tensor) -> Tensor | None:
        pairs = {"k": self.keys, "v": (fresh, cached)}
        moved = [new.float() - old.float() for new, old in (pairs[part] for part in self.compare)]
        scaled = torch.cat([x / x.square().mean().sqrt().clamp(min=1e-9) for x in moved])
        return super().narrow(l, layout, scaled, torch.zeros_like(scaled))


class ComparingRun(_Run):
    """A prefill that shows its policy keys too. Both are rotated to one place: as far apart as before RoPE."""

    policy: Comparing

    def _layer(self, l: int, hidden: Tensor, rows: Rows, plans: Any) -> tuple[Tensor, Rows | None]:
        self._keys = self.adapter.project(l, hidden).k  # computed twice then; nothing here is timed
        return super()._layer(l, hidden, rows, plans)

    def _narrow(self, l: int, rows: Rows, values: Tensor) -> Tensor | None:
        fresh = self.adapter.rotate(self._keys, self.ropes[l].at(rows.there))
        which = self.layout.reusable[rows.here].nonzero()[:, 0].to(fresh.device)
        self.policy.keys = fresh[:, which], self.cache.keys[l][:, rows.there[which]]
        return super()._narrow(l, rows, values)


def fronts_of(chunks: Sequence[TokenIds], vectors: np.ndarray, others: int) -> dict[str, Front]:
    """Fronts of the prefix and `others` of these chunks, nearest last; vectors [chunks, dimension], of unit length."""
    row = {ids: n for n, ids in enumerate(chunks)}

    def front(kind: str, prompt: Prompt, i: int) -> TokenIds:
        own, here = row[prompt.chunks[i].ids], {row[chunk.ids] for chunk in prompt.chunks}
        rows = sorted((here if kind == "near_here" else set(row.values()) - here) - {own})
        if kind == "random":
            rows = random.Random(own).sample(rows, min(others, len(rows)))
        order = np.argsort(vectors[rows] @ vectors[own], kind="stable")[-others:]
        return (*prompt.prefix, *(id for n in order for id in chunks[rows[n]]))

    return {kind: partial(front, kind) for kind in FRONTS[2:]}


def make_fronts(engine: Engine, passages: Sequence[Chunk], others: int) -> dict[str, Front]:
    """All of them, by the engine's embedder, whose vectors are kept for the next run."""
    chunks = list(dict.fromkeys(chunk.ids for chunk in passages))
    embedder = Embedder.load(engine.config.retrieve.embedder)
    texts = [engine.reader.tokenizer.decode(ids, skip_special_tokens=True) for ids in chunks]
    digest = xxhash.xxh3_64_hexdigest("\0".join((embedder.fingerprint, *texts)).encode())
    path, part = (ROOT / f"{state}-{digest}.npy" for state in ("vectors", "part"))
    if not path.is_file():
        with console.progress("Embedding", "windows") as update:
            np.save(part, embedder.embed(texts, update))
        part.replace(path)
    primer = PromptBuilder(engine.reader.tokenizer, changed(engine.config.prompt, behind="primer")).behind
    return {**PLAIN, **fronts_of(chunks, np.load(path), others), "primer": lambda prompt, i: primer}


def lay_out_behind(engine: Engine, prompt: Prompt, front: Front, exact: bool = False) -> Layout:
    """With the KV of each chunk computed behind its front; exact: that is the prompt's prefix alone."""
    adapter, views = engine.reader.adapter, list[MemoryChunk]()
    for i, chunk in enumerate(prompt.chunks):
        behind = front(prompt, i)
        if len(behind) + len(chunk) > adapter.context_limit:
            raise PromptTooLong(len(behind), adapter.context_limit, len(chunk))
        views.append(MemoryChunk(ChunkComputer(adapter, behind).compute([chunk.ids])[0]))
    prefix = engine.blender.computer(prompt.prefix).front
    return lay_out(prompt, MemoryChunk(prefix), views, behind_prefix=exact)


@torch.inference_mode()
def blended(adapter: Adapter, prompt: Prompt, layout: Layout, case: Case, room: int = 0) -> Prefilled:
    """By the package, except for what only this script does."""
    if case.blend.policy != "deviation":
        return prefill(adapter, prompt, layout, case.blend, room)
    check_policy(case.blend, adapter.n_layers)
    cache, clock = KVCache(adapter, len(prompt) + room), Clock(adapter.device)
    run = ComparingRun(adapter, prompt, layout, case.blend, cache, clock)
    run.policy = Comparing(case.blend)
    run.policy.compare = case.compare
    return run.go()


def ask(engine: Engine, fronts: Mapping[str, Front], prompt: Prompt, cases: Sequence[Case]) -> Iterator[Line]:
    """A line for each case: its KL to full prefill."""
    adapter, reader, decode = engine.reader.adapter, engine.reader, engine.config.decode
    at, room, layouts = len(prompt), decode.max_new_tokens, dict[str, Layout]()
    full = engine.blender.run(prompt, BlendConfig(method="full"), room).prefilled
    tokens = tuple(generate(adapter, full.cache, at, full.logits, decode, reader.end_tokens))
    answer = decisions(reader, tokens, len(tokens) < room)
    logits = forced(adapter, full.cache, at, full.logits, answer)
    for case in cases:
        if (front := case.front) not in layouts:
            layouts[front] = lay_out_behind(engine, prompt, fronts[front], exact=front == "prefix")
        done = blended(adapter, prompt, layouts[front], case, room)
        kls = kl(logits, forced(adapter, done.cache, at, done.logits, answer))
        yield {"method": case.name, "first_kl": kls[0], "mean_kl": sum(kls) / len(kls), "cost": done.cost}


def figures(cases: Sequence[Case], lines: Mapping[tuple[str, str], Line], ids: Sequence[str]) -> Line:
    """By case: each share's interval with its number of questions, None where the unit is zero."""
    found = {case.name: Line() for case in cases}
    for case in cases:
        shares = ("mean", "mean_kl", UNIT), ("first", "first_kl", UNIT), ("of_plain", "mean_kl", case.plain)
        for name, what, unit in shares:
            interval = share(*([lines[id, method][what] for id in ids] for method in (case.name, unit)))
            found[case.name][name] = interval and asdict(interval)
    return found


def main(
    experiment: Annotated[str, typer.Option(help="enrich or deviation.")],
    dataset: Annotated[str, typer.Option(help="As of `blendserve evaluate`.")] = "generated",
    corpus: Annotated[Path | None, typer.Option(help="Passages, if not beside the questions.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens of a chunk; default: a passage.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Chunks of a prompt, at most.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions, the first ones.")] = None,
    half: Annotated[str, typer.Option(help="Of those: first, second or both.")] = "both",
    others: Annotated[int, typer.Option(min=1, help="Chunks that one is enriched by.")] = 3,
    model: Annotated[str, typer.Option(help="Reader.")] = ReaderConfig().model,
    json: Annotated[bool, typer.Option("--json", help="Only the JSON line.")] = False,
) -> None:
    """Run an experiment, or go on with it."""
    if experiment not in CASES:
        raise typer.BadParameter(f"experiment {experiment!r}: known are {', '.join(CASES)}")
    cases, data = CASES[experiment](), load(dataset, corpus=corpus)
    given = {"dataset": dataset, "corpus": corpus, "window": window, "chunks": chunks, "limit": limit}
    plan = EvaluateConfig(**given, half=half, methods=[case.name for case in cases])
    settings = changed(SETTINGS, reader={"model": model})
    path = ROOT / Path(model).name / f"{plan.name}-{experiment}{others if experiment == 'enrich' else ''}"
    folder = RunFolder(path, plan, settings, environment())
    with folder, open_engine(plan, data, settings, ROOT, console.say) as engine:
        setting = Setting(engine, plan)
        prompts = {e.id: setting.prompt(e.question, setting.context(e)) for e in data.examples}
        passages = [] if window else [engine.prompts.chunk(passage) for passage in data.corpus]
        passages += [chunk for prompt in prompts.values() for chunk in prompt.chunks]
        fronts = make_fronts(engine, passages, others) if experiment == "enrich" else PLAIN
        start, step = {"both": (0, 1), "first": (0, 2), "second": (1, 2)}[half]
        wanted = [e.id for e in data.examples[:limit][start::step]]
        fits = engine.reader.adapter.context_limit - settings.decode.max_new_tokens
        asked = [id for id in wanted if len(prompts[id]) <= fits]
        console.say(f"{len(asked)} questions, {len(wanted) - len(asked)} left out as too long for the reader")
        with console.progress("Questions", "questions") as update:
            for n, id in enumerate(asked):
                left = [case for case in cases if (id, case.name) not in folder.predictions]
                folder.add_prompt({"id": id, "ids": list(prompts[id].ids)})
                for line in ask(engine, fronts, prompts[id], left) if left else ():
                    folder.add_prediction({"id": id, **line})
                update(n + 1, len(asked))
    found = figures(cases, folder.predictions, asked)
    if not json:
        text = "{mean:.3f} [{low:.3f}, {high:.3f}]".format_map
        rows = [(name, *(text(x) if x else "-" for x in figure.values())) for name, figure in found.items()]
        console.table("KL / full reuse's", ("case", "mean", "first token", "mean / plain case's"), rows)
    console.print_json({"folder": str(path), "questions": len(asked), "cases": found})


if __name__ == "__main__":
    typer.run(main)
