"""What no setting of the product turns: enriched chunks, and other forms of CacheBlend's rule, against full prefill.

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
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from blendserve import console
from blendserve.blend.layout import Layout, lay_out
from blendserve.blend.policies.base import LayerKV, Scene
from blendserve.blend.policies.deviation import DeviationPolicy
from blendserve.blend.precompute import ChunkComputer
from blendserve.blend.prefill import prefill
from blendserve.config import BlendConfig, Config, DecodeConfig, changed
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.engine.engine import Engine
from blendserve.engine.generation import generate
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import InputError, PromptTooLong
from blendserve.evaluate.answers import decisions
from blendserve.evaluate.config import PROMPT, EvaluateConfig
from blendserve.evaluate.datasets import load
from blendserve.evaluate.fidelity import forced, kl
from blendserve.evaluate.folder import Line, RunFolder
from blendserve.evaluate.intervals import share
from blendserve.evaluate.prompts import Setting, open_engine
from blendserve.evaluate.variants import variants
from blendserve.provenance import environment
from blendserve.registry import ALONE, POLICIES, REUSE, RULE, nearest
from blendserve.retrieve import Embedder
from blendserve.store.memory import MemoryChunk

ROOT = Path("runs") / "study"
SETTINGS = Config(prompt=PROMPT, decode=DecodeConfig(max_new_tokens=16), blend=BlendConfig(method="blend"))
UNIT = f"{REUSE['policy']}/prefix"  # full reuse
FRONTS = ("prefix", "primer", "near_here", "near_elsewhere", "random")
Front = Callable[[Prompt, int], TokenIds]  # what the prompt's i-th chunk is computed behind
PLAIN: dict[str, Front] = {"prefix": lambda prompt, i: prompt.prefix}


class Case(NamedTuple):
    """One way to blend, over chunk KV computed behind one kind of front."""

    name: str
    blend: BlendConfig
    plain: str  # the case that this one would improve on
    front: str = "prefix"


def enriched() -> list[Case]:
    methods = [
        v
        for v in variants((REUSE["policy"], POLICIES.default, f"{POLICIES.default}+{ALONE}"), (0.05, 0.15))
        if v.kind == "blend"
    ]
    return [Case(f"{v}/{front}", v.blend, f"{v}/prefix", front) for v in methods for front in FRONTS]


def compared() -> list[Case]:
    by = {"v": RULE, "k": f"{RULE}_by_k", "kv": f"{RULE}_by_kv"}
    POLICIES.add(by["k"], f"{__name__}:{CompareKeys.__name__}")
    POLICIES.add(by["kv"], f"{__name__}:{CompareBoth.__name__}")
    rule = BlendConfig(method="blend", policy=RULE, ratio=0.15)
    cases = [Case(UNIT, changed(rule, **REUSE), UNIT)]
    for correction in (REUSE["correction"], ALONE):
        for layers in ((1,), (2,), (4,), (8,), (1, 2, 3)):
            blend = changed(rule, correction=correction, check_layers=layers)
            at = f"[{','.join(map(str, layers))}]+{correction}"
            plain = f"v[1]+{correction}"
            cases += [Case(part + at, changed(blend, policy=name), plain) for part, name in by.items()]
    return cases


CASES = {"enrich": enriched, "deviation": compared}


class CompareKeys(DeviationPolicy):
    """CacheBlend's rule by K. Both are rotated to one place: as far apart as before RoPE."""

    parts: ClassVar[tuple[int, ...]] = (0,)  # of (keys, values)

    def narrow(self, l: int, scene: Scene, at: Tensor, fresh: LayerKV, cached: LayerKV) -> Tensor | None:
        """Of several parts, each in units of its own, as keys are larger."""
        moved = [fresh[part].float() - cached[part].float() for part in self.parts]
        scaled = torch.cat([x / x.square().mean().sqrt().clamp(min=1e-9) for x in moved])
        nothing = torch.zeros_like(scaled)
        return super().narrow(l, scene, at, (scaled, scaled), (nothing, nothing))


class CompareBoth(CompareKeys):
    """CacheBlend's rule by K and V together."""

    parts = (0, 1)


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
    primer = PromptBuilder(
        engine.reader.tokenizer, changed(engine.config.prompt, kv_context="primer")
    ).kv_context
    return {**PLAIN, **fronts_of(chunks, np.load(path), others), "primer": lambda prompt, i: primer}


def lay_out_behind(engine: Engine, prompt: Prompt, front: Front, exact: bool = False) -> Layout:
    """With the KV of each chunk computed behind its front; exact: that is the prompt's prefix alone."""
    adapter, views = engine.reader.adapter, list[MemoryChunk]()
    for i, chunk in enumerate(prompt.chunks):
        behind = front(prompt, i)
        if len(behind) + len(chunk) > adapter.context_limit:
            raise PromptTooLong(len(behind), adapter.context_limit, len(chunk))
        views.append(MemoryChunk(ChunkComputer(adapter, behind).compute([chunk.ids])[0]))
    prefix = engine.blender.computer(prompt.prefix).context_kv
    return lay_out(prompt, MemoryChunk(prefix), views, behind_prefix=exact)


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
        done = prefill(adapter, prompt, layouts[front], case.blend, room)
        kls = kl(logits, forced(adapter, done.cache, at, done.logits, answer))
        yield {"method": case.name, "first_kl": kls[0], "mean_kl": sum(kls) / len(kls), "cost": done.cost}


def figures(cases: Sequence[Case], lines: Mapping[tuple[str, str], Line], ids: Sequence[str]) -> Line:
    """By case: each share's interval with its number of questions, None where the unit is zero."""
    found = {case.name: Line() for case in cases}
    for case in cases:
        shares = ("mean", "mean_kl", UNIT), ("first", "first_kl", UNIT), ("of_plain", "mean_kl", case.plain)
        for name, what, unit in shares:
            ours, theirs = ([lines[id, method][what] for id in ids] for method in (case.name, unit))
            interval = share(ours, theirs)
            found[case.name][name] = interval and asdict(interval)
    return found


def run(experiment: str, plan: EvaluateConfig, model: str, others: int) -> Line:
    """Run an experiment, or go on with it -> where it is kept, and the figures of every case.

    others: chunks that one is enriched by. Raises InputError for an experiment that is none, and as `evaluate` does.
    """
    if experiment not in CASES:
        raise InputError(f"there is no experiment {experiment!r}: {nearest(experiment, list(CASES))}")
    cases, data = CASES[experiment](), load(plan.dataset, corpus=plan.corpus)
    plan = changed(plan, methods=[case.name for case in cases])
    settings = changed(SETTINGS, reader={"model": model})
    path = ROOT / Path(model).name / f"{plan.name}-{experiment}{others if experiment == 'enrich' else ''}"
    folder = RunFolder(path, plan, settings, environment())
    with folder, open_engine(plan, data, settings, ROOT, console.say) as engine:
        setting = Setting(engine, plan)
        prompts = {e.id: setting.prompt(e.question, setting.context(e)) for e in data.examples}
        passages = [] if plan.window else [engine.prompts.chunk(passage) for passage in data.corpus]
        passages += [chunk for prompt in prompts.values() for chunk in prompt.chunks]
        fronts = make_fronts(engine, passages, others) if experiment == "enrich" else PLAIN
        wanted = [e.id for e in data.examples[: plan.limit][plan.part]]
        fits = engine.reader.adapter.context_limit - settings.decode.max_new_tokens
        asked = [id for id in wanted if len(prompts[id]) <= fits]
        console.say(f"{len(asked)} questions, {len(wanted) - len(asked)} left out as too long for the model")
        with console.progress("Questions", "questions") as update:
            for n, id in enumerate(asked):
                left = [case for case in cases if (id, case.name) not in folder.predictions]
                folder.add_prompt({"id": id, "ids": list(prompts[id].ids)})
                for line in ask(engine, fronts, prompts[id], left) if left else ():
                    folder.add_prediction({"id": id, **line})
                update(n + 1, len(asked))
    found = figures(cases, folder.predictions, asked)
    return {"folder": str(path), "questions": len(asked), "cases": found}


def table(cases: Line) -> list[tuple[str, ...]]:
    """A row a case: its shares with their intervals."""
    text = "{mean:.3f} [{low:.3f}, {high:.3f}]".format_map
    return [(name, *(text(x) if x else "-" for x in figure.values())) for name, figure in cases.items()]
