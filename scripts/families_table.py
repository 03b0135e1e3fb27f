"""Print docs/models.md, made from the table in blendserve/models/families.py.

python scripts/families_table.py > docs/models.md
"""

from __future__ import annotations

from collections import defaultdict

from blendserve.models.families import FAMILIES, MOVABLE_ROPE, REFUSED, Family

HEAD = """\
# Models

<!-- Printed by scripts/families_table.py from blendserve/models/families.py; a test compares. -->

A model is known by the `model_type` of its configuration. Each family below is held against its own `model.forward` on
tiny random models, layer by layer (tests/models/test_adapter.py), and every reader passes the gate on its real weights
before it may blend: `python -m blendserve doctor --model ...` prints the checks; blendserve/engine/gate.py says what they
mean. A reader that fails is refused with the failed check and its numbers; `method="full"` still answers, by the model's
own forward.

## Supported
"""
PLAN = {
    "experts": "mixture of experts",
    "fused_qkv": "fused qkv",
    "parallel": "attention and MLP side by side",
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
    """What a family does beside plain Llama layers, in words."""
    words = [NORMS[family.before_attention is not None, family.after_attention is not None]]
    words += [QK_NORM[family.qk_norm]] if family.qk_norm in QK_NORM else []
    words += [WINDOWS[family.windows]] if family.windows in WINDOWS else []
    words += ["some layers without RoPE"] if family.rotates is not Family("").rotates else []
    words += [text for name, text in PLAN.items() if getattr(family, name)]
    return ", ".join(dict.fromkeys(words))


def page() -> str:
    """The whole document."""
    lines = [HEAD, "| `model_type` | models | layers |", "|---|---|---|"]
    lines += [f"| `{kind}` | {family.models} | {plan(family)} |" for kind, family in sorted(FAMILIES.items())]
    lines += [
        "",
        f"RoPE of type {', '.join(f'`{rope}`' for rope in sorted(MOVABLE_ROPE))}, over all or a part of each head.",
    ]
    lines += [
        "`dynamic` and `longrope` are refused: their angles change with the sequence length, so that a stored key"
    ]
    lines += [
        "would be right for one length only.",
        "",
        "## Refused by name",
        "",
        "| why | `model_type` |",
        "|---|---|",
    ]
    reasons: dict[str, list[str]] = defaultdict(list)
    for kind, reason in REFUSED.items():
        reasons[reason].append(f"`{kind}`")
    lines += [f"| {reason} | {', '.join(sorted(kinds))} |" for reason, kinds in sorted(reasons.items())]
    lines += [
        "",
        "Any other type is refused too: nobody has proven blending right on it. docs/how-to/extend.md tells how.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
