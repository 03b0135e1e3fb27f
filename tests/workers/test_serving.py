"""Replicas on one server behind one endpoint: their answers are one engine's, and a dead one's are asked again."""

from __future__ import annotations

import ipaddress
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from blendserve.config import changed
from blendserve.serve.app import make_cluster_app
from blendserve.serve.config import ServeConfig
from blendserve.serve.routed import RemoteReader, RoutedService
from blendserve.workers.cluster import Share
from blendserve.workers.replicas import ReplicaCount, Replicas
from tests.engine.helpers import CONFIG, QUESTIONS, engine
from tests.serve.helpers import library
from tests.store.valkey.servers import needs_server, settings
from tests.workers.engines import OpenToy, kill

pytestmark = needs_server
SERVE = ServeConfig(slots=4, slot_tokens=512, max_concurrent=8)
MOST_TRIES = 12


class Ingress:
    """Replicas, and the endpoint in front of them, in this process."""

    def __init__(self, folder: Path, share: Share) -> None:
        self.opener = OpenToy(settings(folder), folder / "puts")
        self.replicas = Replicas(self.opener.replica, SERVE.batching, ReplicaCount(3, 3), share)
        self.here = engine(changed(CONFIG, decode={"max_new_tokens": 40}))
        found, facts = library(folder, self.here), self.replicas.facts()
        chunks = self.here.prompts.chunk_ids(
            [p for index in found.collections.values() for p in index.passages]
        )
        with self.opener() as shared:
            for one in (self.here, shared):
                one.blender.precompute(chunks)
        reader = RemoteReader(facts, self.here.reader.tokenizer)
        self.service = RoutedService(self.here.config, found, SERVE, reader, self.here.prompts, self.replicas)
        config = uvicorn.Config(make_cluster_app(self.service), port=0, log_level="warning", lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def ask(self, question: str, **options: Any) -> Any:
        message: Any = [{"role": "user", "content": question}]
        return self.client.chat.completions.create(model="tiny", messages=message, **options)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.replicas.__exit__()


def expected(ingress: Ingress, question: str) -> str:
    """One engine's own answer over the same passages."""
    passages = ingress.service.library.search(["a", "b"], question, CONFIG.retrieve.top_k)
    return ingress.here.answer(question, passages).text


def answers_are_those_of_one_engine_whole_or_streamed(ingress: Ingress) -> None:
    for question in QUESTIONS:
        whole = ingress.ask(question)
        stream = ingress.ask(question, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert whole.choices[0].message.content == text == expected(ingress, question)
        assert whole.x_blendserve["timings"]["ttft"] > whole.x_blendserve["timings"]["retrieve"] > 0


def the_same_question_finds_its_chunks_in_memory(ingress: Ingress, question: str = QUESTIONS[0]) -> None:
    """Three times in a row, sooner or later: a replica that is slow to take a question is passed over for once."""
    in_a_row = 0
    for _ in range(MOST_TRIES):
        report = ingress.ask(question).x_blendserve["report"]
        in_a_row = in_a_row + 1 if report["tiers"] == {"local": report["chunks_hit"]} else 0
        if in_a_row == 3:
            return
    raise AssertionError(f"{MOST_TRIES} times asked, and the last one's report is {report}")


def an_error_of_a_request_is_its_own_status(ingress: Ingress) -> None:
    with pytest.raises(openai.BadRequestError, match="too many"):
        ingress.ask("cat " * 600)
    with pytest.raises(openai.NotFoundError):
        ingress.client.models.retrieve("another")
    assert httpx.get(f"{ingress.url}/ready").json() == {"status": "ready"}


def no_request_fails_when_a_node_and_a_replica_are_killed(ingress: Ingress) -> None:
    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(24)]
    right = {question: expected(ingress, question) for question in QUESTIONS}
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ingress.ask, question) for question in asked]
        answers[2].result()
        ((process, node),) = ingress.opener.second_pids
        kill(process, node)
        answers[9].result()
        kill(ingress.opener.pids[0])
        texts = [answer.result().choices[0].message.content for answer in answers]
    assert texts == [right[question] for question in asked]


def no_request_fails_while_replicas_come_and_go(ingress: Ingress) -> None:
    right = {question: expected(ingress, question) for question in QUESTIONS}
    done, wrong = threading.Event(), list[str]()

    def keep_asking(n: int) -> None:
        while not done.is_set():
            question = QUESTIONS[n % len(QUESTIONS)]
            text = ingress.ask(question).choices[0].message.content
            wrong.extend([text] if text != right[question] else [])

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(keep_asking, n) for n in range(3)]
        try:
            for n in (1, 2):
                ingress.replicas.scale(n)
        finally:
            done.set()
        for client in clients:
            client.result()
    assert not wrong
    for question in QUESTIONS:
        ingress.ask(question)
        the_same_question_finds_its_chunks_in_memory(ingress, question)


def replicas_are_reached_from_this_machine_alone(ingress: Ingress) -> None:
    for pid in ingress.opener.pids:
        assert (open_to := listening(pid))
        assert all(address.is_loopback for address in open_to), open_to


def listening(pid: int) -> list[ipaddress.IPv4Address]:
    """Addresses that a process listens on; those of IPv6 as what they map to, 0.0.0.0 for any."""
    links = (os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink())
    sockets = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                found.append(ipaddress.IPv4Address(bytes.fromhex(local.partition(":")[0][-8:])[::-1]))
    return found


@pytest.mark.usefixtures("second_node")
def test_a_cluster_s_endpoint(share: Share, tmp_path: Path) -> None:
    """One test, as replicas take long to start and tests may be spread over processes."""
    ingress = Ingress(tmp_path, share)
    try:
        replicas_are_reached_from_this_machine_alone(ingress)
        answers_are_those_of_one_engine_whole_or_streamed(ingress)
        the_same_question_finds_its_chunks_in_memory(ingress)
        an_error_of_a_request_is_its_own_status(ingress)
        no_request_fails_when_a_node_and_a_replica_are_killed(ingress)
        no_request_fails_while_replicas_come_and_go(ingress)
    finally:
        ingress.close()
