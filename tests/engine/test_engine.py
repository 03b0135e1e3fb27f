"""Questions through the whole engine: what a tiny reader says does not depend on where KV lay or who else asks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend import priors
from blendserve.config import BlendConfig, Config, PromptConfig, changed
from blendserve.core import Answer, Passage
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError, InputError, PromptTooLong
from blendserve.models.adapter import Adapter
from blendserve.models.loader import Reader, end_tokens, fingerprint
from blendserve.paths import index_folder
from blendserve.store import KVStore, LMDBStore, MemoryStore
from tests.support.blending import assert_near, model_logits
from tests.support.models import BASE
from tests.support.tokenizers import bundled_tokenizer

LIMIT = 512
CONFIG = Config(
    prompt=PromptConfig(system="Be brief.", instruction="Read."),
    blend=BlendConfig(method="blend"),  # "auto" would time this machine first
)
PASSAGES = [
    Passage("The cat sat on the mat and looked at the moon.", "Cats"),
    Passage("A dog barked at the mailman all morning long."),
    Passage("", "Empty but for its title"),
    Passage("Snow fell on the hills, and nobody came to the house by the river."),
]
QUESTION = "Who sat on the mat?"


@cache
def tiny_reader() -> Reader:
    torch.manual_seed(0)
    model: Any = tf.LlamaForCausalLM(
        tf.LlamaConfig(**{**BASE, "vocab_size": 49152, "max_position_embeddings": LIMIT})
    ).eval()
    tokenizer = bundled_tokenizer()
    return Reader("tiny", Adapter(model), tokenizer, fingerprint(model), end_tokens(model, tokenizer))


def engine(store: KVStore | None = None, config: Config = CONFIG) -> Engine:
    return Engine(config, tiny_reader(), store or MemoryStore(2**30))


@pytest.fixture
def warm() -> Iterator[Engine]:
    with engine() as made:
        made.precompute(PASSAGES)
        yield made


def seen(answer: Answer) -> dict[str, Any]:
    """An answer without its timings."""
    return {k: v for k, v in answer.to_dict().items() if k != "timings"} | {"ids": answer.token_ids}


def test_memory_warm_and_cold_stores_give_one_answer(warm: Engine, tmp_path: Path) -> None:
    in_memory = seen(warm.answer(QUESTION, PASSAGES))
    with engine(LMDBStore(tmp_path / "kv", 2**30)) as made:
        made.precompute(PASSAGES)
        assert seen(made.answer(QUESTION, PASSAGES)) == in_memory
    with engine(LMDBStore(tmp_path / "kv", 2**30, read_only=True)) as made:
        assert seen(made.answer(QUESTION, PASSAGES)) == in_memory
    assert in_memory["report"]["blended"]
    assert in_memory["report"]["chunks_hit"] == 4


METHODS = ["blend", "full", "prefix", "reuse"]


@given(
    order=st.lists(st.integers(0, 3), max_size=6),
    stored=st.sets(st.integers(0, 3)),
    method=st.sampled_from(METHODS),
    ratio=st.sampled_from([0.0, 0.15, 1.0]),
    policy=st.sampled_from(["query", "deviation", "chunk_head"]),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_any_passages_in_any_order_get_an_answer(
    order: list[int], stored: set[int], method: str, ratio: float, policy: str, temperature: float
) -> None:
    passages = [*PASSAGES[:3], Passage("  ")]
    with engine() as made:
        made.precompute([passages[i] for i in stored])
        given_ = [passages[i] for i in order]
        options: dict[str, Any] = {"method": method, "ratio": ratio, "policy": policy}
        answer = made.answer(QUESTION, given_, **options, temperature=temperature, max_new_tokens=3)
    report = answer.report
    assert answer.passages == tuple(given_)
    assert 1 <= len(answer.token_ids) <= 3
    assert report.tokens_prompt == len(made.prompts.build(QUESTION, given_))
    assert report.chunks_hit + report.chunks_missing == (
        {"full": 0, "prefix": min(1, sum(i < 3 for i in order))}.get(method, sum(i < 3 for i in order))
    )
    if temperature == 0.0 and (method in {"full", "prefix"} or (ratio == 1.0 and method == "blend")):
        assert answer.token_ids == plain(tuple(given_), 3)


@cache
def plain(passages: tuple[Passage, ...], new_tokens: int) -> tuple[int, ...]:
    """transformers' own greedy answer."""
    reader, made = tiny_reader(), engine()
    prompt = torch.tensor([made.prompts.build(QUESTION, passages).ids])
    model: Any = reader.adapter.model
    said = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=sorted(reader.end_tokens),
    )
    return tuple(i for i in said[0, prompt.shape[1] :].tolist() if i not in reader.end_tokens)


def test_full_is_transformers_generate() -> None:
    assert engine().answer(QUESTION, PASSAGES, method="full", max_new_tokens=20).token_ids == plain(
        tuple(PASSAGES), 20
    )


def test_streamed_pieces_join_to_the_answer(warm: Engine) -> None:
    stream = warm.stream(QUESTION, PASSAGES, max_new_tokens=12)
    pieces = list(stream)
    answer = stream.answer()
    assert "".join(pieces) == answer.text == warm.answer(QUESTION, PASSAGES, max_new_tokens=12).text
    assert list(stream) == []
    assert answer.finish_reason == "length"
    timings = answer.timings
    assert timings.ttft >= timings.prefill >= timings.load > 0


def test_interleaved_streams_say_what_each_says_alone(warm: Engine) -> None:
    orders = [PASSAGES, PASSAGES[::-1], PASSAGES[1:], PASSAGES[:1]]
    alone = [warm.answer(QUESTION, order, max_new_tokens=10).token_ids for order in orders]
    streams = [warm.stream(QUESTION, order, max_new_tokens=10) for order in orders]
    sources = [iter(stream) for stream in streams]
    for _ in range(12):
        for source in sources:
            next(source, None)
    assert [stream.answer().token_ids for stream in streams] == alone
    assert len(set(alone)) == len(alone)


def test_threads_and_a_cancelled_stream_disturb_nobody(warm: Engine) -> None:
    orders = [PASSAGES[i:] + PASSAGES[:i] for i in range(4)] * 3

    def ask(order: list[Passage]) -> tuple[int, ...]:
        next(iter(warm.stream(QUESTION, order)), None)  # dropped after its first piece
        gc.collect()
        return warm.answer(QUESTION, order, max_new_tokens=8).token_ids

    alone = [warm.answer(QUESTION, order, max_new_tokens=8).token_ids for order in orders]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, orders)) == alone


def test_what_a_request_misses_is_stored_after_its_answer() -> None:
    with engine() as made:
        stream = made.stream(QUESTION, PASSAGES)
        assert stream.report.chunks_missing == 4
        assert made.missing(PASSAGES) == 4
        stream.answer()
        assert made.missing(PASSAGES) == 0
        again = made.answer(QUESTION, PASSAGES)
        assert (again.report.chunks_hit, again.report.blended) == (4, True)


def test_without_write_back_the_store_stays_as_it_is() -> None:
    with engine(config=changed(CONFIG, store={"write_back": False})) as made:
        made.answer(QUESTION, PASSAGES)
        assert made.missing(PASSAGES) == 4


def test_a_prompt_that_fits_to_the_token_and_one_that_does_not(warm: Engine) -> None:
    n = len(warm.prompts.build(QUESTION, PASSAGES))
    answer = warm.answer(QUESTION, PASSAGES, max_new_tokens=LIMIT - n, temperature=1.0)
    assert answer.report.tokens_prompt + len(answer.token_ids) <= LIMIT
    with pytest.raises(
        PromptTooLong, match=rf"{n} tokens and {LIMIT - n + 1} are reserved .* 1 too many"
    ) as e:
        warm.answer(QUESTION, PASSAGES, max_new_tokens=LIMIT - n + 1)
    assert e.value.over == 1


def test_ratio_1_has_the_models_logits(warm: Engine) -> None:
    prompt = warm.prompts.build(QUESTION, PASSAGES)
    done = warm.blender.run(prompt, BlendConfig(ratio=1.0)).prefilled
    assert_near(done.logits, model_logits(tiny_reader().adapter, prompt))


def test_a_stop_string_ends_the_answer(warm: Engine) -> None:
    free = warm.answer(QUESTION, PASSAGES, max_new_tokens=12)
    stop = free.text[len(free.text) // 2 :][:3]
    cut = warm.answer(QUESTION, PASSAGES, max_new_tokens=12, stop=(stop,))
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("question", "options", "error", "message"),
    [
        ("  ", {}, InputError, "question is empty"),
        (QUESTION, {"ratoi": 0.5}, ConfigError, "unknown option 'ratoi': did you mean 'ratio'"),
        (QUESTION, {"ratio": 1.5}, ConfigError, "'blend.ratio' cannot be 1.5"),
        (QUESTION, {"method": "both"}, ConfigError, "'blend.method' cannot be 'both'"),
        (QUESTION, {"passages": None}, InputError, "this engine has no index"),
    ],
)
def test_bad_input_is_refused_by_name(
    question: str, options: dict[str, Any], error: type[Exception], message: str, warm: Engine
) -> None:
    with pytest.raises(error, match=message):
        warm.stream(question, **{"passages": PASSAGES, **options})


def test_a_seed_serves_policy_and_sampling(warm: Engine) -> None:
    options: dict[str, Any] = {"policy": "random", "temperature": 1.0, "max_new_tokens": 10}
    texts = [warm.answer(QUESTION, PASSAGES, seed=s, **options).token_ids for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_that_does_not_exist(shard: tuple[int, int], warm: Engine) -> None:
    with pytest.raises(InputError, match="does not exist"):
        warm.precompute(PASSAGES, shard)


def test_shards_are_disjoint_and_cover_everything() -> None:
    with engine() as made:
        done = [made.precompute(PASSAGES, (i, 3)).computed for i in range(3)]
        assert sum(done) == len(PASSAGES) + 1  # and the prefix, once
        assert made.missing(PASSAGES) == 0


def test_a_bare_name_is_an_index_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert index_folder("demo") == Path("indexes/demo")
    assert index_folder("here") == Path("here")
    assert index_folder("a/b") == Path("a/b")


def test_precompute_learns_how_chunks_move_once_and_the_next_engine_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(priors, "LEAST_TOKENS", 1)
    steps, store = list[tuple[int, int]](), MemoryStore(2**30)
    with engine(store) as first:
        assert not first.answer(QUESTION, PASSAGES).report.prior
        first.blender.known.use(None)
        first.precompute(PASSAGES, learning=lambda done, total: steps.append((done, total)))
        assert steps[-1][0] == steps[-1][1] > 0
        said = seen(first.answer(QUESTION, PASSAGES))
        assert said["report"]["prior"]
    with engine(store) as second:
        second.precompute(PASSAGES, learning=lambda done, total: pytest.fail("learnt twice"))
        assert seen(second.answer(QUESTION, PASSAGES)) == said


def test_a_correction_that_knows_nothing_beforehand_has_nothing_learnt() -> None:
    blend = BlendConfig(method="blend", correction="ridge")
    with engine(config=Config(prompt=CONFIG.prompt, blend=blend)) as made:
        made.precompute(PASSAGES, learning=lambda done, total: pytest.fail("learnt"))


def test_near_duplicates_are_refused_where_the_store_never_finds_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "tells_ids", False)
    with engine() as made, pytest.raises(ConfigError, match="does not tell the tokens"):
        made.answer(QUESTION, PASSAGES, near=True)
