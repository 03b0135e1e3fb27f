"""Workloads, random models, counted work, page cache and memory, each against values known in advance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from blendserve.bench import page_cache
from blendserve.bench.fixture import PromptFixture, time_prompt
from blendserve.bench.roofline import Counts, Rates, prefill_work, work_of
from blendserve.bench.workload import make_workload
from blendserve.config import ModelConfig
from blendserve.errors import InputError, ModelError, ModelUnsupported, StoreError
from blendserve.evaluate.methods import parse_methods
from blendserve.models.loader import LoadedModel, load_model
from blendserve.models.random import SHAPES, TILE, random_model, shape_config
from tests.bench.conftest import write_shape
from tests.support.models import tiny_decoder


def test_a_workload_has_exactly_the_tokens_asked_for(model: LoadedModel) -> None:
    for chunks, tokens, suffix in ((1, 300, 25), (9, 7, 40)):
        prompt = make_workload(model, chunks, tokens, suffix, seed=3).prompt
        assert [len(chunk) for chunk in prompt.chunks] == [tokens] * chunks
        assert len(prompt.suffix) == suffix
        assert len({chunk.ids for chunk in prompt.chunks}) == chunks
        assert make_workload(model, chunks, tokens, suffix, seed=3).prompt == prompt
        assert make_workload(model, chunks, tokens, suffix, seed=4).prompt != prompt
    for impossible in ((6, 512, 40), (10**9, 10, 40), (2, 1, 40), (2, 20, 3)):
        with pytest.raises(InputError):
            make_workload(model, *impossible, seed=0)


def test_a_dropped_file_is_not_resident_and_a_read_page_is(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 22))
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip()
    if not hasattr(os, "posix_fadvise") or kind == "tmpfs":
        assert page_cache.drop(file)  # why there is no cold figure
        return
    assert page_cache.drop(file) == ""
    assert page_cache.resident(file) == 0.0
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        os.pread(opened.fileno(), 1 << 21, 0)
    assert page_cache.resident(file) == pytest.approx(0.5, abs=0.05)


METER = """
import torch
from blendserve.bench.memory import PeakMeter
held = lambda mib: torch.ones(mib << 20, dtype=torch.uint8)
held(64)
meter = PeakMeter(torch.device("cpu"))
kept = held(16)
held(40)
held(40)
peak = meter.peak()
print("unknown" if peak is None else peak / 2**20, int(kept[-1]))
"""


def test_the_meter_gives_the_most_that_was_held_at_once() -> None:
    """In a fresh process; above 32 MiB, memory always comes from the system and goes back to it."""
    done = subprocess.run([sys.executable, "-c", METER], capture_output=True, text=True, check=True)
    try:
        peak = float(done.stdout.split()[0])
    except ValueError:
        pytest.skip(done.stdout)
    assert peak == pytest.approx(16 + 40, abs=3)


WORDS = ("full", "prefix", "reuse", "query@0.2", "deviation@0.2", "chunk_head@0.5", "query@1", "random@0")


def test_linear_flops_are_those_that_ran(model: LoadedModel, tmp_path: Path) -> None:
    """Attention of a full prefill by the textbook: 2 T^2 H D in a layer; in the last one, one row attends to all."""
    found, workload = parse_methods(WORDS, ()), make_workload(model, 4, 24, 20, seed=0)
    counts, n = Counts.of(model.decoder), len(workload.prompt)
    assert counts
    with PromptFixture(model, workload, found, tmp_path, rates=Rates(flops=1e9, bytes=1e9)) as fixture:
        fixture.precompute()
        for method in (m for m in found if m.name in WORDS):
            with FlopCounterMode(display=False) as counter:
                least_s = fixture.run(method)["roofline_s"]
            linear = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
            _, done = time_prompt(fixture.blender(method), workload, method.blend)
            work = prefill_work(counts, done.report, done.result.recomputed, method.blend)
            assert work.linear == linear, method.name
            assert work.loaded == done.report.bytes_loaded, method.name
            assert least_s == pytest.approx((work.linear + work.attention + work.loaded) / 1e9)
            assert method.name != "full" or work.attention == 4 * 64 * (2 * n * (n + 1) / 2 + n)
        fixture.store.delete([next(iter(fixture.store.keys()))])
        with pytest.raises(StoreError):  # missing KV is an error and not a slow method
            fixture.run(found[-1])
    assert Counts.of(tiny_decoder("mixtral")) is None


@pytest.mark.parametrize("window", [None, 5])
def test_attention_flops_by_a_loop_over_rows_and_keys(window: int | None) -> None:
    counts = Counts(project=0, finish=0, head=0, attention_width=12, windows=(window,))
    rows = [0, 3, 4, 9]
    seen = sum(1 for row in rows for key in range(row + 1) if window is None or row - key < window)
    assert work_of(counts, [(0, 4, torch.tensor(rows), 4)], 0).attention == 4 * 12 * seen


# Parameters in millions as the model cards have them, embeddings once where they are tied.
QWEN = {"Qwen2.5-0.5B": 494, "Qwen2.5-7B": 7616}
MILLIONS = QWEN | {"Llama-3.2-1B": 1236, "Llama-3.1-8B": 8030, "Mistral-7B": 7248}


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape_config(name.lower()))
    model.tie_weights()
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == MILLIONS[name]


def test_weights_are_noise_that_follows_from_the_seed(tiny: str) -> None:
    config = shape_config(tiny.removeprefix("random:"))
    first, other = (random_model(config, torch.float32, seed).state_dict() for seed in (0, 1))
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(*(first[f"model.layers.{l}.mlp.up_proj.weight"] for l in range(2)))
    for name, weights in random_model(config, torch.bfloat16).named_parameters():
        assert weights.dtype == torch.bfloat16
        spread = float(weights.detach().float().std())
        assert weights.eq(1).all() if "norm" in name else 0.018 < spread < 0.022, name
    config.vocab_size = TILE // config.hidden_size + 100  # more than a tile: still no equal rows
    rows = random_model(config, torch.float32).model.embed_tokens.weight
    assert len(rows[-2000:].unique(dim=0)) == 2000
    assert not torch.equal(rows[:100], rows[-100:])


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 0}, {"hidden_size": "wide"}, {"model_type": "nonsense"}, {"model_type": "gpt2"}],
)
def test_a_shape_that_fits_no_model_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises((ModelError, ModelUnsupported)):
        load_model(ModelConfig(name=write_shape(tmp_path, **changes)))
