"""Correction priors of an evaluation: fitted like `precompute` fits them, on chunks without questions or answers.

If half of the questions are asked, the chunks of the other half are used. The priors are kept in the run's folder, so
that a resumed run uses the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blendserve import console
from blendserve.blend.blender import Blender
from blendserve.blend.priors import Priors
from blendserve.core import TokenIds
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.datasets import Dataset
from blendserve.evaluate.methods import MethodSpec
from blendserve.evaluate.prompts import PromptSource
from blendserve.registry import CORRECTIONS


def uses_prior(method: MethodSpec) -> bool:
    """Whether the method's correction uses a prior."""
    return method.kind == "blend" and bool(CORRECTIONS.load(method.blend.correction).uses_prior)


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
        priors: Priors | None = Priors.from_bytes(path.read_bytes(), blender.adapter)
    except (OSError, ValueError):
        with console.progress("Fitting the correction prior", "tokens") as update:
            priors = blender.priors.fit(chunks, update)
        if priors is not None:
            part = path.with_suffix(".part")
            part.write_bytes(priors.to_bytes())
            part.replace(path)
            priors = Priors.from_bytes(path.read_bytes(), blender.adapter)
    blender.priors.use(priors)
