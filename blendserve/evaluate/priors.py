"""Correction priors of an evaluation: fitted like `precompute` fits them, on chunks without questions or answers.

If half of the questions are asked, the chunks of the other half are used. The priors are kept in the run's folder, so
that a resumed run uses the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from blendserve import console
from blendserve.blend.blender import Blender
from blendserve.blend.priors import Priors
from blendserve.config import KVContext
from blendserve.core import TokenIds
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.datasets import Dataset
from blendserve.evaluate.methods import MethodSpec
from blendserve.evaluate.prompts import PromptSource
from blendserve.registry import CORRECTIONS


def fit_priors(
    blenders: Mapping[KVContext | None, Blender],
    methods: Sequence[MethodSpec],
    config: EvaluateConfig,
    dataset: Dataset,
    source: PromptSource,
    folder: Path,
) -> None:
    """Give a blender the priors of its KV context, where a method uses one; from a file in the folder if it has one."""
    needing = [m for m in methods if m.kind == "blend" and CORRECTIONS.load(m.blend.correction).uses_prior]
    chunks = prior_chunks(config, dataset, source) if needing else []
    for context in {m.kv_context for m in needing}:
        path = folder / f"priors-{context or 'run'}-{config.half}.safetensors"
        fit_or_load(blenders[context], path, chunks)


def prior_chunks(config: EvaluateConfig, dataset: Dataset, source: PromptSource) -> list[TokenIds]:
    """The chunks to fit on: the whole corpus in the open setting, else the passages of the questions."""
    if config.setting == "open":
        return source.chunks(dataset.corpus)
    other = {"both": "both", "first": "second", "second": "first"}[config.half]
    examples = dataset.examples[config.model_copy(update={"half": other}).subset]
    return [chunk.ids for e in examples for chunk in source.build(e, source.passages(e)).chunks]


def fit_or_load(blender: Blender, path: Path, chunks: Sequence[TokenIds]) -> None:
    """Give a blender the priors in this file; fit and write them if it is missing, damaged or of another version."""
    try:
        priors: Priors | None = Priors.from_bytes(path.read_bytes(), blender.model)
    except (OSError, ValueError):
        with console.progress("Fitting the correction prior", "tokens") as update:
            priors = blender.priors.fit(chunks, update)
        if priors is not None:
            part = path.with_suffix(".part")
            part.write_bytes(priors.to_bytes())
            part.replace(path)
            priors = Priors.from_bytes(path.read_bytes(), blender.model)
    blender.priors.use(priors)
