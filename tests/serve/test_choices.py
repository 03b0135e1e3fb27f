"""Several answers to one request, log probabilities, and fields that change which tokens are chosen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.support.engines import toy_engine, toy_model
from tests.support.http import MODEL, OWN, Client, Server, asked, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module", params=[1, 3], ids=["1 slot", "3 slots"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    engine = {"decode": {"max_new_tokens": None}}
    with serving(
        tmp_path_factory.mktemp("choices"), has_index=False, slots=request.param, engine=engine
    ) as made:
        yield made


def post(client: Client, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"prompt": "Once upon"} if path == TEXT else {"messages": asked()}
    response = client.post(path, {"model": MODEL, **given, "max_tokens": 12, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def texts(found: dict[str, Any]) -> list[str]:
    return [each["message"]["content"] if "message" in each else each["text"] for each in found["choices"]]


@pytest.mark.parametrize("fields", [{}, {"documents": OWN[:2]}], ids=["plain", "documents"])
def test_each_of_n_answers_is_that_of_its_own_seed(server: Server, fields: dict[str, Any]) -> None:
    server.warm()  # a write-back between two of the requests would change what they blend
    together = post(server, n=3, temperature=1.5, seed=5, **fields)
    alone = [post(server, temperature=1.5, seed=5 + i, **fields) for i in range(3)]
    assert texts(together) == [texts(each)[0] for each in alone]
    assert len(set(texts(together))) == 3
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    assert together["usage"]["completion_tokens"] == 36
    assert together["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]


def test_prompts_in_a_list_are_answered_in_order(server: Server) -> None:
    prompts = ["Once upon", "The end", "A tale"]
    tokenizer = toy_model().tokenizer
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    alone = [texts(post(server, TEXT, prompt=prompt))[0] for prompt in prompts]
    for given in (prompts, ids):
        assert texts(post(server, TEXT, prompt=given)) == alone
    assert texts(post(server, TEXT, prompt=ids[1])) == alone[1:2]
    two = post(server, TEXT, prompt=prompts[:2], n=2, temperature=1, seed=3)
    assert texts(two)[::2] == [
        texts(post(server, TEXT, prompt=p, temperature=1, seed=3))[0] for p in prompts[:2]
    ]


def test_streams_of_several_answers_are_told_apart(server: Server) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": asked(),
        "max_tokens": 12,
        "seed": 5,
        "temperature": 1.5,
    }
    whole = server.openai.chat.completions.create(**fields, n=3)
    said, usage = ["", "", ""], None
    stream = server.openai.chat.completions.create(
        **fields, n=3, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == [choice.message.content for choice in whole.choices]
    assert usage
    assert whole.usage
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_stream_of_several_answers_can_be_left(server: Server) -> None:
    for left_after in range(4):
        with server.openai.chat.completions.create(
            model=MODEL, messages=asked(), n=3, stream=True, max_tokens=30
        ) as stream:
            for _ in zip(range(left_after), stream, strict=False):
                pass
    assert texts(post(server))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_log_probabilities_are_those_of_the_models_own_logits(server: Server, path: str) -> None:
    """Second derivation: the toy model's full prefill over prompt and answer."""
    fields = {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}
    found = post(server, path, max_tokens=4, temperature=1.2, presence_penalty=1, **fields)
    engine, tokenizer = toy_engine(), toy_model().tokenizer
    logprobs = found["choices"][0]["logprobs"]
    if path == CHAT:
        values = [each["logprob"] for each in logprobs["content"]]
        tops = [[other["logprob"] for other in each["top_logprobs"]] for each in logprobs["content"]]
        assert all(bytes(each["bytes"]).decode() == each["token"] for each in logprobs["content"])
    else:
        values, tops = logprobs["token_logprobs"], [list(top.values()) for top in logprobs["top_logprobs"]]
        ids = tokenizer("Once upon")["input_ids"]
        for text, value in zip(logprobs["tokens"], values, strict=True):
            with torch.no_grad():
                logits = engine.model.decoder.reference(torch.tensor([ids])).logits[0, -1].float()
            same = [i for i in range(len(tokenizer)) if tokenizer.decode([i]) == text]
            assert any(abs(float(logits.log_softmax(0)[i]) - value) < 2e-2 for i in same)
            if len(same) > 1:
                break  # which of them it was is not told
            ids += same
    assert len(values) == len(tops) == 4
    assert all(value <= max(top) + 1e-6 for value, top in zip(values, tops, strict=True))
    assert all(value <= 0 for value in values)


def by_transformers(ids: Sequence[int]) -> torch.Tensor:
    """Log probabilities [T, V] after each token of a text, by transformers' own forward pass."""
    with torch.no_grad():
        logits: torch.Tensor = toy_engine().model.decoder.reference(torch.tensor([[*ids]])).logits
    return logits[0].float().log_softmax(-1)


def test_an_echoed_prompt_has_the_log_probabilities_of_transformers(server: Server) -> None:
    """As lm-eval asks for them: a batch, as texts or token ids, with one token of an answer or none."""
    prompts, tokenizer = ["Once upon a time. " * n + "The end" for n in (1, 20)], toy_model().tokenizer
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    post(server, TEXT, prompt=prompts)  # what it leaves in the prefix cache changes nothing
    for max_tokens in (0, 1):
        for given in (prompts, ids):
            found = post(server, TEXT, prompt=given, echo=True, logprobs=2, max_tokens=max_tokens)
            assert found["usage"]["completion_tokens"] == 2 * max_tokens
            for choice, tokens in zip(found["choices"], ids, strict=True):
                logprobs, n = choice["logprobs"], len(tokens)
                expected = by_transformers(tokens)
                best, right = expected.max(-1).values[:-1], expected[range(n - 1), tokens[1:]]
                assert [len(each) for each in logprobs.values()] == [n + max_tokens] * 4
                assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
                torch.testing.assert_close(
                    torch.tensor(logprobs["token_logprobs"][1:n]), right, atol=2e-2, rtol=0
                )
                tops = [max(top.values()) for top in logprobs["top_logprobs"][1:n]]
                torch.testing.assert_close(torch.tensor(tops), best, atol=2e-2, rtol=0)
                assert choice["text"].startswith(
                    tokenizer.decode(tokens) if given is ids else prompts[n > 20]
                )
                assert "".join(logprobs["tokens"]) == choice["text"]


def test_an_echo_is_streamed_before_the_answer(server: Server) -> None:
    fields: dict[str, Any] = {"prompt": ["Once", "The end"], "echo": True, "logprobs": 1, "max_tokens": 4}
    whole = server.openai.completions.create(model=MODEL, **fields, seed=1)
    said, values = ["", ""], [list[Any](), list[Any]()]
    for chunk in server.openai.completions.create(model=MODEL, **fields, seed=1, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.text
            values[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert said == [choice.text for choice in whole.choices]
    assert values == [choice.logprobs.token_logprobs for choice in whole.choices if choice.logprobs]


def test_an_answer_that_ends_at_once_has_the_log_probability_of_its_end(server: Server) -> None:
    """lm-eval drops the last of the log probabilities: it must not be one of the prompt."""
    end, n = toy_model().tokenizer.eos_token_id, len(toy_model().tokenizer("Once upon")["input_ids"])
    fields = {"logit_bias": {str(end): 100}, "ignore_eos": False}
    found = post(server, TEXT, echo=True, logprobs=1, max_tokens=1, **fields)["choices"][0]
    assert found["finish_reason"] == "stop"
    assert len(found["logprobs"]["token_logprobs"]) == n + 1


def test_streamed_log_probabilities_are_the_same(server: Server) -> None:
    whole = post(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    with server.http.stream(
        "POST",
        CHAT,
        json={
            **{"model": MODEL, "messages": asked(), "max_tokens": 12, "ignore_eos": True},
            **{"logprobs": True, "top_logprobs": 2, "stream": True},
        },
    ) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert [
        each for choice in choices for each in (choice["logprobs"] or {"content": []})["content"]
    ] == whole


def test_a_bias_forbids_and_forces_tokens(server: Server) -> None:
    tokenizer = toy_model().tokenizer
    free = post(server, TEXT, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    first = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == free[0])
    assert post(server, TEXT, logprobs=0, logit_bias={str(first): -100})["choices"][0]["text"] != "".join(
        free
    )
    forced = post(server, TEXT, logprobs=0, logit_bias={str(first): 100})["choices"][0]["logprobs"]["tokens"]
    assert set(forced) == {free[0]}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"n": 65}, "64"),
        (CHAT, {"n": 0}, "n"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"echo": True, "documents": OWN[:1]}, "echo"),
        (TEXT, {"prompt": ["a"] * 22, "n": 3}, "64"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [10**9]}, "token 1000000000"),
        (TEXT, {"logit_bias": {"1000000000": 1}}, "logit_bias"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ],
    ids=str,
)
def test_limits_are_named(server: Server, path: str, fields: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"prompt": "Once"} if path == TEXT else {"messages": asked()}
    refused = server.post(path, {"model": MODEL, **given, **fields})
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]
