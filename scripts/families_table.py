"""Write the tables of docs/reference/models.md, from the table of families: python scripts/families_table.py"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from blendserve.models.families import FAMILIES, Family
from blendserve.models.refusals import MOVABLE_ROPE, REFUSED, REFUSED_SETTINGS, TOWERS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
REAL = {"llama": "SmolLM2 135M", "gemma3_text": "Gemma 3 270M"}
PLAN = {
    "experts": "mixture of experts",
    "experts_beside": "experts beside the MLP in some models",
    "shared_mlp": "shared expert",
    "v_norm": "v norms",
    "value_dim": "values of other dims than keys",
    "scales": "scaled parts",
    "layer_inputs": "embeddings by layer in some models",
    "layer_scale": "scaled layers",
    "fused_qkv": "fused qkv",
    "recurrent": "recurrent layers",
    "side_by_side": "each beside attention",
    "llama_norms": "norms before in recurrent layers",
    "latent": "multi-head latent attention",
    "parallel": "parallel attention and MLP",
    "attention_scale": "scaled scores",
    "softcap": "capped scores",
    "sinks": "attention sinks",
    "gate": "gated attention",
    "logits_softcap": "capped logits",
    "typed_rope": "RoPE by layer type",
    "turns_back": "RoPE by negative angles",
    "rope_bases": "RoPE by layer",
    "scaled_queries": "queries scaled by position",
    "embedding_scale": "scaled embeddings",
    "residual_scale": "scaled residuals",
    "logits_scale": "scaled logits",
    "logits_divisor": "scaled logits",
}
NORMS = {
    (True, False): "norms before",
    (False, True): "norms after",
    (True, True): "norms before and after",
}
WINDOWS = {"all": "sliding windows", "typed": "sliding windows in some layers"}
QK_NORM = {"head": "q and k norms", "width": "q and k norms over all heads"}


def plan(family: Family) -> str:
    """The differences of a family from plain Llama layers, in words."""
    words = [NORMS[family.before_attention is not None, family.after_attention is not None]]
    words += ["LayerNorm"] if isinstance(family.norm, str) else []
    words += ["interleaved RoPE"] if family.rotary.neighbours else []
    words += [] if family.mlp else ["attention, a mixer or an MLP in each"]
    words += ["MLP without gate"] if family.mlp_layers[0] in {"up_proj", "c_fc", "fc1"} else []
    words += [QK_NORM[family.qk_norm]] if family.qk_norm in QK_NORM else []
    words += [WINDOWS[family.windows]] if family.windows in WINDOWS else []
    without = family.rope_bases or family.rotates is not Family("").rotates
    words += ["some layers without RoPE"] if without else []
    words += [text for name, text in PLAN.items() if getattr(family, name)]
    return ", ".join(dict.fromkeys(words))


def kept(family: Family) -> str:
    """How many numbers a layer keeps of a token."""
    if family.recurrent:
        kept = "`qk_rope_head_dim` + `kv_lora_rank`" if family.latent else "2 K D"
        return f"{kept}; a state map of a chunk in recurrent layers"
    if family.latent:
        return "`qk_rope_head_dim` + `kv_lora_rank`"
    if family.value_dim:
        return f"K (D + `{family.value_dim}`); K by layer"
    return "2 K D; K and D by layer" if family.v_norm else "2 K D"


def parts() -> dict[str, str]:
    """The generated parts of the page, by their marks."""
    families = [
        f"| `{kind}` | {family.models} | {plan(family)} | {kept(family)} | {REAL.get(kind, 'tiny models')} |"
        for kind, family in sorted(FAMILIES.items())
    ]
    reasons: dict[str, list[str]] = defaultdict(list)
    for kind, reason in REFUSED.items():
        reasons[reason].append(f"`{kind}`")
    types = [f"| {reason} | {', '.join(sorted(kinds))} |" for reason, kinds in sorted(reasons.items())]
    settings = [f"| {reason} | `{setting}` |" for setting, reason in sorted(REFUSED_SETTINGS.items())]
    return {
        "families": "\n".join(
            [
                "| `model_type` | models | layers | KV of a token and layer | proven on |",
                "|---|---|---|---|---|",
                *families,
            ]
        ),
        "towers": names(TOWERS),
        "ropes": names(MOVABLE_ROPE),
        "types": "\n".join(["| reason | `model_type` |", "|---|---|", *types]),
        "settings": "\n".join(["| reason | setting |", "|---|---|", *settings]),
    }


def names(words: Iterable[str]) -> str:
    """A sorted list in lines of the page's width."""
    return textwrap.fill(", ".join(f"`{word}`" for word in sorted(words)), 100, break_on_hyphens=False)


def page() -> str:
    """The page with its generated parts anew. Raises ValueError for a page without their marks."""
    text = PAGE.read_text("utf-8")
    for mark, part in parts().items():
        pattern = rf"(?s)(?<=<!-- generated: {mark} -->\n\n).*?(?=\n\n<!-- end -->)"
        text, n = re.subn(pattern, lambda _, part=part: part, text)  # type: ignore[misc]
        if n != 1:
            raise ValueError(f"{PAGE.name} has {n} parts marked {mark}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
