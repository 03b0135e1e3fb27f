"""Train the adapter of smollm2-135m-reader: python -m scripts.train_reader DATA OUT.safetensors [--steps 420]

A LoRA of rank 16 of all linear layers of the bundled model, to answer briefly from passages (scripts/reading_lessons.py).
DATA is a folder with the lessons' files. One thread of a CPU with AVX2 takes about 75 minutes. A killed run goes on
from its checkpoint, beside OUT, when it is started again with the same steps.

The questions of a lesson share its passages: each attends to them and to itself, at the positions of a prompt of its own.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from blendserve.config import PromptConfig
from blendserve.engine.prompt import PromptBuilder
from blendserve.evaluate.config import PROMPT
from blendserve.models.sources import DEFAULT, source_of
from scripts.reading_lessons import FILES, Lesson, Lessons

RANK, SCALE, LEARNING_RATE = 16, 2.0, 4e-4
STEPS, WARM_UP, ACCUMULATED = 420, 40, 4
EVERY = 20  # steps between lines and checkpoints, a multiple of ACCUMULATED
PROMPTS = (PROMPT, PROMPT, PROMPT, PromptConfig())  # by turns
ABOUT = {
    "data": f"{', '.join(FILES)}; worlds of benchmarks/generate_world",
    "licences": "CC BY-SA 4.0 (SQuAD, HotpotQA), CC BY 4.0 (MuSiQue), Apache-2.0 (generated worlds)",
}


class LoRA(nn.Module):
    """A frozen linear layer plus SCALE * x @ b.T @ a.T; a [out, RANK], b [RANK, in]."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.zeros(base.out_features, RANK))
        self.b = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + SCALE * F.linear(F.linear(x, self.b), self.a)

    def factors(self) -> dict[str, Tensor]:
        """bf16, the scale in `a`."""
        return {"a": (SCALE * self.a).detach().bfloat16(), "b": self.b.detach().bfloat16()}


class Encoded(NamedTuple):
    """A lesson as tensors; T tokens, N of them predict an answer's token."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    mask: Tensor  # bool [T, T]
    predicting: Tensor  # [N], indices of ids
    targets: Tensor  # [N], ids


def encode(lesson: Lesson, prompts: PromptBuilder, end_token: int) -> Encoded:
    """The passages once, then each question with its answer."""
    ids = [*prompts.prefix, *(i for chunk in map(prompts.chunk, lesson.passages) for i in chunk.ids)]
    n, blocks, positions = len(ids), [0] * len(ids), list(range(len(ids)))
    predicting: list[int] = []
    targets: list[int] = []
    for block, (question, answer) in enumerate(lesson.asked, 1):
        suffix, said = prompts.frame(question).suffix, (*prompts.text_ids(answer), end_token)
        predicting += range(len(ids) + len(suffix) - 1, len(ids) + len(suffix) + len(said) - 1)
        targets += said
        ids += [*suffix, *said]
        blocks += [block] * (len(suffix) + len(said))
        positions += range(n, n + len(suffix) + len(said))
    block_of = torch.tensor(blocks)
    return Encoded(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        mask=((block_of == 0) | (block_of == block_of[:, None])).tril(),
        predicting=torch.tensor(predicting),
        targets=torch.tensor(targets),
    )


def loss_of(model: Any, lesson: Encoded) -> Tensor:
    """Mean cross-entropy of the answers' tokens."""
    x, positions, mask = lesson.ids[None], lesson.positions[None], lesson.mask[None, None]
    hidden = model.model(x, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden[0, lesson.predicting]).float(), lesson.targets)


def add_adapters(model: Any) -> dict[str, LoRA]:
    """Freeze the model and put a LoRA around each linear layer of its decoder -> by the weight's name."""
    model.requires_grad_(False)
    named = [(name, m) for name, m in model.model.named_modules(prefix="model") if isinstance(m, nn.Linear)]
    adapters = {f"{name}.weight": LoRA(linear) for name, linear in named}
    for name, adapter in adapters.items():
        parent, _, own = name.removesuffix(".weight").rpartition(".")
        setattr(model.get_submodule(parent), own, adapter)
    return adapters


def train(data: Path, out: Path, steps: int, base: str) -> None:
    """Train and write the adapter: `NAME.a` and `NAME.b` in bf16, whose product is added to the weight NAME."""
    torch.manual_seed(0)
    folder, lessons, checkpoint = source_of(base), Lessons(data), out.with_suffix(".checkpoint")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapters = add_adapters(model)
    factors = nn.ParameterList(p for adapter in adapters.values() for p in (adapter.a, adapter.b))
    optimizer = torch.optim.AdamW(factors, weight_decay=0.0)
    prompts, first = [PromptBuilder(tokenizer, words) for words in PROMPTS], 0
    if checkpoint.exists():
        first, values, state = torch.load(checkpoint)
        factors.load_state_dict(values)
        optimizer.load_state_dict(state)
        print(f"goes on after step {first}, from {checkpoint}", flush=True)
    began, total = time.monotonic(), 0.0
    for step in range(first, steps):
        lesson = encode(lessons(step), prompts[step % len(prompts)], tokenizer.eos_token_id)
        loss = loss_of(model, lesson)
        (loss / ACCUMULATED).backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        done = step + 1
        if done % ACCUMULATED == 0 or done == steps:
            rate = LEARNING_RATE * min(1.0, done / WARM_UP) * max(0.05, 1 - done / steps)
            optimizer.param_groups[0]["lr"] = rate
            nn.utils.clip_grad_norm_(factors, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if done % EVERY == 0:
            seconds = (time.monotonic() - began) / (done - first)
            print(f"step {done}/{steps}  loss {total / EVERY:.3f}  {seconds:.1f} s/step", flush=True)
            total, scratch = 0.0, checkpoint.with_suffix(".scratch")
            torch.save((done, factors.state_dict(), optimizer.state_dict()), scratch)
            scratch.replace(checkpoint)
    pairs = {f"{n}.{k}": x for n, adapter in adapters.items() for k, x in adapter.factors().items()}
    save_file(pairs, out, {"base": base, "recipe": f"scripts/train_reader.py --steps {steps}", **ABOUT})
    checkpoint.unlink(missing_ok=True)
    print(f"wrote {out}, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="Folder of the lessons' files")
    parser.add_argument("out", type=Path, help="File of the adapter")
    parser.add_argument("--steps", type=int, default=STEPS, help="Number of lessons")
    parser.add_argument("--base", default=DEFAULT, help="Model to train, a folder or a bundled name")
    options = parser.parse_args()
    train(options.data, options.out, options.steps, options.base)
