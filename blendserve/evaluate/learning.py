"""What corrections may know of a data set beforehand: how its chunks move in company (blend/priors.py).

It is learnt as `precompute` learns it, from chunks in random company, without questions or answers; never from the half
that is asked where only a half is. It lies in the run's folder, so that a run that goes on knows the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blendserve import console
from blendserve.blend.blender import Blender
from blendserve.blend.priors import Priors
from blendserve.core import TokenIds
from blendserve.engine.engine import Engine
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.datasets import Dataset
from blendserve.evaluate.formats import Example
from blendserve.evaluate.methods import MethodSpec
from blendserve.evaluate.prompts import Setting
from blendserve.models.adapter import Adapter
from blendserve.registry import CORRECTIONS


def uses_prior(variant: MethodSpec) -> bool:
    """Whether what is learnt changes what this method does."""
    return variant.kind == "blend" and bool(CORRECTIONS.load(variant.blend.correction).uses_prior)


def corpus_of(plan: EvaluateConfig, dataset: Dataset, setting: Setting, engine: Engine) -> list[TokenIds]:
    """The chunks to learn from: of the whole corpus where it is searched, else those that come with the questions."""
    if plan.setting == "open":
        return list(engine.prompts.chunk_ids(dataset.corpus))
    prompts = (setting.prompt(e.question, setting.context(e)) for e in _not_asked(plan, dataset))
    return [chunk.ids for prompt in prompts for chunk in prompt.chunks]


def _not_asked(plan: EvaluateConfig, dataset: Dataset) -> Sequence[Example]:
    if plan.half == "both":
        return dataset.examples
    other: EvaluateConfig = plan.model_copy(update={"half": "first" if plan.half == "second" else "second"})
    return dataset.examples[other.part]


def teach(blender: Blender, name: str, chunks: Sequence[TokenIds], folder: Path) -> None:
    """Have a blender know what these chunks show, or what the folder has of it under this name."""
    path, adapter = folder / f"priors-{name}.safetensors", blender.adapter
    if not _readable(path, adapter):
        with console.progress("Fitting the correction prior", "tokens") as update:
            made = blender.priors.fit(chunks, update)
        if made is None:
            blender.priors.use(None)
            return
        part = path.with_suffix(".part")
        part.write_bytes(made.to_bytes())
        part.replace(path)
    blender.priors.use(Priors.from_bytes(path.read_bytes(), adapter))


def _readable(path: Path, adapter: Adapter) -> bool:
    """Whether priors are there, of this version; what is not is learnt anew."""
    try:
        Priors.from_bytes(path.read_bytes(), adapter)
    except (OSError, ValueError):
        return False
    return True
