"""The gate lets every supported family through, sees each kind of mistake, and keeps its verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from blendserve.blend import prefill as prefill_module
from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.engine import gate
from blendserve.engine.engine import Engine
from blendserve.engine.gate import GateReport, GateRow, check, examine, verdict
from blendserve.errors import ModelUnsupported
from blendserve.kernels import rows
from blendserve.kernels.rows import RowPlan, plan_rows
from blendserve.kernels.types import Rope
from blendserve.models.adapter import Adapter, Projected
from blendserve.models.families import FAMILIES
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import Reader
from blendserve.models.random_model import Folded
from tests.engine.test_engine import CONFIG, PASSAGES, QUESTION, engine, plain, tiny_reader
from tests.support.blending import OneOff, some_prompt
from tests.support.models import KINDS, TINY, config, tiny_adapter, tiny_model
from tests.support.tokenizers import bundled_reader, bundled_tokenizer

PROMPT = some_prompt([26, 24, 25], prefix=16, suffix=12)


def failed(adapter: Adapter) -> set[str]:
    """What the gate finds wrong, by the first words of each check."""
    return {row.check.partition(":")[0] for row in examine(adapter, PROMPT, 9) if not row.passed}


@pytest.mark.parametrize("name", TINY)
def test_every_family_passes(name: str) -> None:
    assert failed(tiny_adapter(name)) == set()


@pytest.mark.parametrize("name", KINDS)
def test_in_bf16_too(name: str) -> None:
    assert failed(tiny_adapter(name, torch.bfloat16)) == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_reader_passes_and_is_well_within_its_bounds(dtype: str) -> None:
    report = check(bundled_reader(dtype))
    assert report.passed, report.failure
    rows = {row.check: row for row in report.rows}
    assert rows["moved: layer-0 keys are forward's"].value == 0.0
    for row in report.rows:
        room = row.value / row.bound if row.above else row.bound / row.value if row.value else 1e9
        assert room > 1.5, str(row)


SAME = {"nothing stored", "ratio 1.0", "one chunk in front"}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
def test_sees_stored_keys_one_position_off(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(prefill_module, "KVLoader", OneOff)
    assert failed(tiny_adapter("llama", dtype)) == {"ratio 1.0", "one chunk in front"}


class Lopsided(Adapter):
    """Rotates by a function that its inverse does not undo."""

    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        return super().rotate(x, Rope(rope.cos, rope.sin.abs()))


@DTYPES
def test_sees_a_rotation_that_cannot_be_undone(dtype: torch.dtype) -> None:
    assert {"turned", "moved"} | SAME <= failed(Lopsided(tiny_model("llama", dtype)))


class Rotated(Adapter):
    """Hands out keys that carry a rotation already."""

    def project(self, l: int, hidden: torch.Tensor) -> Projected:
        rows = super().project(l, hidden)
        spin = self.rope(torch.arange(hidden.shape[0]))[l]
        return Projected(rows.q, self.rotate(rows.k, spin), rows.v)


@DTYPES
def test_sees_keys_that_are_not_before_rope(dtype: torch.dtype) -> None:
    assert {"moved"} | SAME <= failed(Rotated(tiny_model("llama", dtype)))


@DTYPES
def test_sees_rows_that_look_one_position_too_far(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def far(positions: torch.Tensor, n_heads: int, window: int | None, known: torch.Tensor) -> RowPlan:
        return plan_rows((positions + 1).clamp(max=len(PROMPT) - 1), n_heads, window)

    monkeypatch.setattr(rows, "plan_rows", far)
    assert failed(tiny_adapter("llama", dtype)) >= SAME


class Forgetful(KVCache):
    """Loses a row of the suffix; slots are those of the prompt and one more for the decoded token."""

    def write(self, l: int, at: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().write(l, at, keys, values)
        self.keys[l][:, self.capacity - 4] = 0
        self.values[l][:, self.capacity - 4] = 0


def test_sees_a_dropped_suffix_row(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = bundled_reader("bfloat16")  # a tiny random model in bf16 is too noisy for one row of a hundred
    monkeypatch.setattr(prefill_module, "KVCache", Forgetful)
    assert failed(tiny_adapter("llama")) >= SAME
    assert {row.check.partition(":")[0] for row in check(bf16).rows if not row.passed} >= SAME


@pytest.mark.parametrize(
    ("kind", "name", "field"),
    [
        ("gemma2", "gemma2", "softcap"),
        ("gemma2", "gemma2", "logits_softcap"),
        ("gemma3_text", "gemma3_text", "windows"),
        ("mistral", "mistral-window", "windows"),
        ("qwen3", "qwen3", "qk_norm"),
        ("granite", "granite", "residual_scale"),
        ("granite", "granite", "logits_divisor"),
        ("smollm3", "smollm3", "rotates"),
    ],
)
def test_sees_a_family_plan_that_lacks_something(
    kind: str, name: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = dataclasses.replace(FAMILIES[kind], **{field: getattr(FAMILIES["llama"], field)})
    monkeypatch.setitem(FAMILIES, kind, lacking)
    assert SAME & failed(Adapter(tiny_model(name)))


def windowed(window: int, context: int = 1024) -> Reader:
    """A tiny model with a window, and a real tokenizer."""
    torch.manual_seed(0)
    made = config(tf.MistralConfig, sliding_window=window, max_position_embeddings=context)
    model: Any = tf.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    return Reader("windowed", Adapter(model.eval()), Folded(bundled_tokenizer(), 97), "windowed", frozenset())


def test_the_prompt_is_longer_than_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a plan without the window would pass on the real weights."""
    reader = windowed(200)
    assert check(reader).passed
    lacking = dataclasses.replace(FAMILIES["mistral"], windows="no")
    monkeypatch.setitem(FAMILIES, "mistral", lacking)
    without = Reader("wrong", Adapter(reader.adapter.model), reader.tokenizer, "wrong", frozenset())
    assert not check(without).passed


@pytest.mark.parametrize(
    ("window", "context", "least", "most"),
    [(20, 1024, 21, 200), (600, 1024, 601, 850), (900, 300, 100, 299), (5000, 8192, 1800, gate.LONGEST)],
)
def test_the_prompt_keeps_within_a_cap_and_the_context(
    window: int, context: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[Prompt] = []

    def examined(adapter: Adapter, prompt: Prompt, following: int) -> tuple[GateRow, ...]:
        prompts.append(prompt)
        return ()

    monkeypatch.setattr(gate, "examine", examined)
    check(windowed(window, context))
    assert least <= len(prompts[0]) <= most


def test_sees_checks_that_could_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that recomputes everything, whatever it is told, would pass all the others."""
    monkeypatch.setattr(gate, "BlendConfig", lambda **options: BlendConfig(**{**options, "ratio": 1.0}))
    assert failed(tiny_adapter("llama")) == {"full reuse"}


def test_nan_passes_nothing() -> None:
    nan = float("nan")
    assert not GateRow("x", nan, 1.0).passed
    assert not GateRow("x", nan, 1.0, above=True).passed
    assert GateRow("x", 1.0, 1.0).passed
    model = tiny_model.__wrapped__("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = nan
    assert SAME | {"full reuse"} <= failed(Adapter(model))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and a tiny reader loaded before it was there."""
    tiny_reader()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def no_more(reader: Reader) -> GateReport:
    raise AssertionError("the gate was asked again")


def test_the_verdict_is_kept_by_fingerprint(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    first = verdict(tiny_reader(), told.append)
    assert first.passed
    assert len(told) == 1
    with monkeypatch.context() as patch:
        patch.setattr(gate, "check", no_more)
        assert verdict(tiny_reader(), told.append) == first
        with pytest.raises(AssertionError, match="asked again"):
            verdict(dataclasses.replace(tiny_reader(), fingerprint="other"))
        patch.setattr(gate, "FORMAT", gate.FORMAT + 1)
        with pytest.raises(AssertionError, match="asked again"):
            verdict(tiny_reader())
    assert len(told) == 1


def test_a_damaged_verdict_is_made_again(home: Path) -> None:
    first = verdict(tiny_reader())
    (file,) = (home / "blendserve" / "gate").iterdir()
    for damage in ("", "[1]", '[{"check": "x"}]', "{"):
        file.write_text(damage)
        assert verdict(tiny_reader()) == first


def test_a_verdict_that_cannot_be_kept_is_still_given(home: Path) -> None:
    (home / "blendserve").write_text("a file where the folder should be")
    assert verdict(tiny_reader()).passed


def failing() -> GateReport:
    return GateReport("tiny", (GateRow("moved: x", 0.5, 0.01), GateRow("turned: y", 0.0, 0.01)))


@pytest.fixture
def barred() -> Iterator[Engine]:
    with engine() as made:
        made.gate = failing()
        yield made


@pytest.mark.parametrize("method", ["blend", "reuse", "prefix"])
def test_a_failing_reader_is_refused_with_the_check_and_its_numbers(barred: Engine, method: str) -> None:
    with pytest.raises(
        ModelUnsupported, match=r"'tiny' cannot blend.*moved: x: 0\.5, at most 0\.01 wanted\. Use"
    ):
        barred.answer(QUESTION, PASSAGES, method=method)
    with pytest.raises(ModelUnsupported, match="cannot blend"):
        barred.precompute(PASSAGES)


@pytest.mark.parametrize("method", ["full", "auto"])
def test_a_failing_reader_still_answers_by_its_own_forward(
    barred: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(tuple(PASSAGES), 12)
    monkeypatch.setattr(Adapter, "project", None)  # ours is not to be used at all
    answer = barred.answer(QUESTION, PASSAGES, method=method, max_new_tokens=12)
    assert answer.token_ids == expected
    assert answer.report.method == "full"
    assert "moved: x: 0.5" in answer.report.reason
    assert answer.report.tokens_computed + answer.report.tokens_suffix == answer.report.tokens_prompt
    assert answer.timings.ttft >= answer.timings.prefill > 0


def test_an_engine_asks_the_gate_when_it_opens(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("blendserve.engine.engine.load_reader", lambda *_: tiny_reader())
    Engine.open(CONFIG, say=told.append).close()
    assert [text.split(" (")[0] for text in told] == ["Checking that blending is correct with tiny"]
