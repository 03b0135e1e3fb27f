"""The gate lets every supported family through, sees each kind of mistake, and keeps its verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.blend import prefill as prefill_module
from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.engine import gate
from blendserve.engine.engine import Engine
from blendserve.engine.gate import GateReport, GateRow, check, check_model, run_checks
from blendserve.errors import ModelUnsupported
from blendserve.kernels import autotune, rows
from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.types import Rope
from blendserve.models.families import FAMILIES
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.random import ModuloTokenizer
from tests.support.blending import OneOff, some_prompt
from tests.support.engines import CONFIG, PASSAGES, QUESTIONS, generated, toy_engine, toy_model
from tests.support.models import HYBRIDS, KINDS, TINY, config, from_config, tiny_decoder, tiny_model
from tests.support.tokenizers import bundled_tokenizer

PROMPT = some_prompt([26, 24, 25], prefix=16, suffix=12)
SAME = {"nothing stored", "ratio 1.0", "one chunk in front"}
FP32, BF16 = torch.float32, torch.bfloat16
# bf16 sends rows to other experts
DENSE_HYBRIDS = [name for name in HYBRIDS if not tiny_decoder(name).has_experts]


def failed(decoder: DecoderModel) -> set[str]:
    """The checks that find something wrong, by the first words of each."""
    return {row.check.partition(":")[0] for row in run_checks(decoder, PROMPT, 9) if not row.passed}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, FP32) for name in TINY), *((name, BF16) for name in (*KINDS, *DENSE_HYBRIDS))],
)
def test_every_family_passes(name: str, dtype: torch.dtype) -> None:
    assert failed(tiny_decoder(name, dtype)) == set()


class Forgetful(KVCache):
    """Loses a row of the suffix; slots are those of the prompt and one more for the decoded token."""

    def write(self, l: int, at: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().write(l, at, keys, values)
        self.keys[l][:, self.capacity - 4] = 0
        self.values[l][:, self.capacity - 4] = 0


def one_row_too_far(positions: torch.Tensor, n_heads: int, window: int | None, *_: Any) -> AttentionPlan:
    return plan_rows((positions + 1).clamp(max=len(PROMPT) - 1), n_heads, window)


def rotate_lopsided(self: DecoderModel, x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """By a function that its inverse does not undo."""
    return rotate(self, x, Rope(rope.cos, rope.sin.abs()))


rotate = DecoderModel.rotate
MISTAKES = [
    (FP32, prefill_module, "KVLoader", OneOff, {"layer-0 keys", "ratio 1.0", "one chunk in front"}),
    (FP32, rows, "plan_rows", one_row_too_far, SAME),
    (FP32, DecoderModel, "rotate", rotate_lopsided, {"rope round trip"} | SAME),
]


@pytest.mark.parametrize(
    ("dtype", "module", "name", "broken", "checks"),
    [
        *MISTAKES,
        *((BF16, *mistake) for _, *mistake in MISTAKES),
        (FP32, gate, "KVCache", Forgetful, SAME),  # one row of a hundred: less than bf16's rounding
    ],
)
def test_a_mistake_fails_its_checks(
    dtype: torch.dtype, module: Any, name: str, broken: Any, checks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, broken)
    assert failed(DecoderModel.of(tiny_model("llama", dtype))) >= checks


def windowed(window: int, context: int = 1024) -> LoadedModel:
    """A tiny model with a window, and a real tokenizer."""
    model = from_config(config("mistral", sliding_window=window, max_position_embeddings=context))
    return LoadedModel(
        "windowed",
        DecoderModel.of(model),
        ModuloTokenizer(bundled_tokenizer(), 97),
        "windowed",
        frozenset(),
    )


def test_a_plan_without_the_window_fails_on_real_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = windowed(200)
    assert check(model).passed
    monkeypatch.setitem(FAMILIES, "mistral", dataclasses.replace(FAMILIES["mistral"], windows="no"))
    assert not check(dataclasses.replace(model, decoder=DecoderModel.of(model.decoder.reference))).passed


@pytest.mark.parametrize(
    ("window", "context", "least", "most"),
    [(20, 1024, 21, 200), (600, 1024, 601, 850), (900, 300, 100, 299), (5000, 8192, 1800, gate.MAX_TOKENS)],
)
def test_the_prompt_is_longer_than_the_window_within_a_cap_and_the_context(
    window: int, context: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def run_checks(decoder: DecoderModel, prompt: Prompt, following: int) -> tuple[GateRow, ...]:
        lengths.append(len(prompt))
        return ()

    monkeypatch.setattr(gate, "run_checks", run_checks)
    check(windowed(window, context))
    assert least <= lengths[0] <= most


def test_nothing_passes_that_cannot_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that recomputes everything, and NaN, pass no check."""
    nan = float("nan")
    rows = (GateRow("x", nan, 1.0), GateRow("x", nan, 1.0, above=True), GateRow("x", 1.0, 1.0))
    assert [row.passed for row in rows] == [False, False, True]
    model = tiny_model.__wrapped__("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = nan
    assert SAME | {"full reuse"} <= failed(DecoderModel.of(model))
    monkeypatch.setattr(gate, "BlendConfig", lambda **options: BlendConfig(**{**options, "ratio": 1.0}))
    assert failed(tiny_decoder("llama")) == {"full reuse"}


def test_the_verdict_is_kept_by_fingerprint_code_and_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, kept = list[str](), tmp_path / "blendserve" / "gate"

    def counted(model: LoadedModel) -> GateReport:
        checked.append(model.fingerprint)
        return GateReport(model.name, (GateRow("rope round trip: x", 0.0, 1.0),))

    model, other = toy_model(), dataclasses.replace(toy_model(), fingerprint="other")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gate, "check", counted)
    first = check_model(model)
    Engine.open(CONFIG, model=model).close()
    assert [check_model(r) for r in (model, other, other)] == [first] * 3
    assert checked == [model.fingerprint, "other"]
    for n, changes in enumerate(("another digest of the code", "other kernels"), 3):
        double = (gate, "code_digest") if n == 3 else (autotune, "machine")
        monkeypatch.setattr(*double, lambda *_, changes=changes: changes)
        assert check_model(model) == first
        assert len(checked) == n
    damages: list[Callable[[bytes], bytes]] = [
        *(lambda x: b"", lambda x: b"[]", lambda x: x[: len(x) // 2], lambda x: x[:-1])
    ]
    for n, damage in enumerate(damages, 5):
        for file in kept.iterdir():
            file.write_bytes(damage(file.read_bytes()))
        assert check_model(model) == first
        assert len(checked) == n
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(kept.iterdir())))  # where nothing can be kept
    assert check_model(model) == first


def test_a_failing_reader_is_refused_or_answers_by_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_engine() as made:
        made.gate = GateReport("tiny", (GateRow("layer-0 keys: x", 0.5, 0.01),))
        for refused in (lambda: made.answer(QUESTIONS[0], PASSAGES), lambda: made.precompute(PASSAGES)):
            with pytest.raises(ModelUnsupported):
                refused()
        expected = generated(PASSAGES, 12)
        monkeypatch.setattr(DecoderModel, "project", None)  # ours is not to be used at all
        for method in ("full", "auto"):
            answer = made.answer(QUESTIONS[0], PASSAGES, method=method)
            report = answer.report
            assert (answer.token_ids, report.method) == (expected, "full")
            assert made.gate.failure in report.reason
            assert report.tokens_computed + report.tokens_suffix == report.tokens_prompt
            assert answer.timings.ttft >= answer.timings.prefill > 0
