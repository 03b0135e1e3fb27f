"""Print docs/reference/models.md, made from the table in blendserve/models/families.py.

python scripts/families_table.py > docs/reference/models.md
"""

from __future__ import annotations

import textwrap
from collections import defaultdict

from blendserve.models.families import FAMILIES, MOVABLE_ROPE, REFUSED, REFUSED_SETTINGS, TOWERS, Family
from blendserve.models.sources import BUNDLED

HEAD = """\
# Models

<!-- Printed by scripts/families_table.py from blendserve/models/families.py; a test compares. -->

Which models can blendserve run? `--model` (or `model.name`) takes five forms:

| form | example |
|---|---|
| bundled name | BUNDLED |
| Hugging Face id | `Qwen/Qwen2.5-0.5B-Instruct` |
| folder | `./my-model`, with `config.json`, weights and tokenizer |
| GGUF file of llama.cpp or Ollama | `./my-model.Q4_K_M.gguf`, dequantised to bf16 once |
| shape with random weights | `random:Qwen2.5-0.5B`, for benchmarks |

The packages of `gemma3-270m` (253 MB) are optional, and under the
[Gemma Terms of Use](https://ai.google.dev/gemma/terms).

The `model_type` in the model's `config.json` decides whether blendserve supports it. The test suite
compares each family below with its own `model.forward` in transformers, layer by layer, on tiny
models with random weights (`tests/models/test_model.py`).

Before a model blends, blendserve checks it once on its real weights. The command
`blendserve doctor --model MODEL` prints these checks. A model that fails one cannot blend: the
message names the failed check. Method `auto` and method `full` then answer by full prefill with the
model's own forward.

To add a family, see [Bring a model](../how-to/bring-a-model.md).

## Supported

The column "layers" names the differences from plain Llama layers. The column "run with" names the
real weights on which the checks passed; elsewhere the evidence is tiny models.

"""
GGUF = """\
## GGUF files

blendserve has its own converter for the bundled `smollm2-135m`. For any other file it uses transformers, which needs
two more packages: `pip install gguf accelerate`.

It refuses files that scale their RoPE (Llama 3.1 and later, Gemma 3 from 4B), because transformers'
conversion drops the scale. Use the Hugging Face folder of these models.
"""
REAL = {"llama": "SmolLM2 135M", "gemma3_text": "Gemma 3 270M"}
PLAN = {
    "experts": "mixture of experts",
    "fused_qkv": "fused qkv",
    "parallel": "parallel attention and MLP",
    "attention_scale": "scaled scores",
    "softcap": "capped scores",
    "logits_softcap": "capped logits",
    "typed_rope": "RoPE by layer type",
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
    words += ["MLP without gate"] if family.mlp_layers[0] in {"up_proj", "c_fc"} else []
    words += [QK_NORM[family.qk_norm]] if family.qk_norm in QK_NORM else []
    words += [WINDOWS[family.windows]] if family.windows in WINDOWS else []
    words += ["some layers without RoPE"] if family.rotates is not Family("").rotates else []
    words += [text for name, text in PLAN.items() if getattr(family, name)]
    return ", ".join(dict.fromkeys(words))


def page() -> str:
    """The whole document."""
    head = HEAD.replace("BUNDLED", ", ".join(f"`{name}`" for name in BUNDLED))
    lines = [head + "| `model_type` | models | layers | run with |", "|---|---|---|---|"]
    lines += [
        f"| `{kind}` | {family.models} | {plan(family)} | {REAL.get(kind, '')} |"
        for kind, family in sorted(FAMILIES.items())
    ]
    towers = ", ".join(f"`{kind}`" for kind in sorted(TOWERS))
    tower_text = (
        f"Checkpoints that also read pictures: {towers}. blendserve runs their text model, if its type is in the table, "
        "and drops the vision modules. A request with an image is refused."
    )
    lines += [
        "",
        "## Vision checkpoints",
        "",
        textwrap.fill(tower_text, 100, break_on_hyphens=False),
        "",
        GGUF,
    ]
    ropes = ", ".join(f"`{rope}`" for rope in sorted(MOVABLE_ROPE))
    rope_text = (
        f"Supported RoPE types: {ropes}, over the whole head or a part of it. `dynamic` and `longrope` are rejected: "
        "their angles change with the sequence length, so a cached key would be correct for one length only."
    )
    lines += ["## RoPE", "", textwrap.fill(rope_text, 100, break_on_hyphens=False)]
    lines += ["", "## Rejected by name", "", "| reason | `model_type` |", "|---|---|"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for kind, reason in REFUSED.items():
        reasons[reason].append(f"`{kind}`")
    lines += [f"| {reason} | {', '.join(sorted(kinds))} |" for reason, kinds in sorted(reasons.items())]
    lines += ["", "## Rejected by setting", "", "| reason | setting |", "|---|---|"]
    lines += [f"| {reason} | `{setting}` |" for setting, reason in sorted(REFUSED_SETTINGS.items())]
    lines += ["", "Any other type is rejected, too: no test has shown that blending is correct with it."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
