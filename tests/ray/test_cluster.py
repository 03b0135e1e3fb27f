"""A real Ray cluster: precompute by actors, and replicas behind one endpoint, while processes and nodes are killed."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from blendserve.config import ServeConfig
from blendserve.errors import ClusterUnavailable
from blendserve.ray.cluster import WorkerResources, check_address, cluster
from blendserve.ray.ingress import RayEngineClient
from blendserve.ray.precompute import precompute
from blendserve.ray.replicas import ReplicaCount, Replicas
from blendserve.serve.app import create_engine_app
from tests.ray.engines import CHUNKS, OF_REPLICAS, SECOND_NODE, OpenToy
from tests.support.engines import CONFIG, QUESTIONS, toy_engine
from tests.support.http import Client, Listener, library
from tests.support.stores import read
from tests.support.valkey import needs_server, settings
from tests.support.waiting import eventually

pytestmark = [needs_server, pytest.mark.floors, pytest.mark.timeout(300)]  # starting a cluster counts
SERVE = ServeConfig(slots=4, slot_tokens=512, max_concurrent=8)
MOST_TRIES = 12

# A dead node refuses a connection and is known to be dead in a second; one that stalls has ten, five times.
NODE_DEATH = {"RAY_health_check_period_ms": "200", "RAY_health_check_initial_delay_ms": "200"}

# The command `ray`, which would take the machine's address for 127.0.0.1, where the first node does not listen.
RAY_ON_LOOPBACK = (
    "from ray._private import services\nservices.resolve_ip_for_localhost = str\n"
    "from ray.scripts.scripts import main\nmain()"
)


@pytest.fixture(scope="session")
def share() -> Iterator[WorkerResources]:
    """Of each of two workers."""
    if importlib.util.find_spec("ray") is None:  # an import here would come before the cluster's settings
        pytest.skip("Ray is not installed: pip install '.[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NODE_DEATH.items():
            patch.setenv(name, value)
        with cluster(None, 2) as each:
            yield each


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["one node", "two nodes"])
def two_nodes(share: WorkerResources, request: pytest.FixtureRequest) -> Iterator[bool]:
    """True: a node of one CPU has joined, as users are told to; processes on it have SECOND_NODE in their environment."""
    if not request.param:
        yield False
        return
    import ray

    here = os.environ | {SECOND_NODE: "1", "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    where = ["--address", ray.get_runtime_context().gcs_address, "--node-ip-address", "127.0.0.1"]
    options = [*where, "--num-cpus", "1", "--object-store-memory", "80000000", "--block"]
    command = [sys.executable, "-c", RAY_ON_LOOPBACK, "start", *options]
    before = sum(n["Alive"] for n in ray.nodes())
    with subprocess.Popen(command, env=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as node:
        eventually(lambda: node.poll() is not None or sum(n["Alive"] for n in ray.nodes()) > before)
        assert node.poll() is None, "the second node ended"
        yield True
        node.terminate()


class Ingress(Client):
    """Replicas, and the endpoint in front of them, in this process."""

    def __init__(self, folder: Path, share: WorkerResources, n: int) -> None:
        self.opener = OpenToy(settings(folder), folder / "opened", replica=True)
        self.replicas = Replicas(self.opener, SERVE, ReplicaCount(n, n), share)
        self.here = toy_engine(config=OF_REPLICAS)
        found, prompts = library(folder, self.here), self.here.prompts
        chunks = prompts.chunk_ids([p for index in found.collections.values() for p in index.passages])
        with replace(self.opener, log=folder / "here")() as shared:
            for one in (self.here, shared):
                one.blender.writer.precompute(chunks)
        tokenizer = self.here.model.tokenizer
        client = RayEngineClient(self.here.config, found, SERVE, tokenizer, prompts, self.replicas)
        self.library, self.listener = found, Listener(create_engine_app(client))
        super().__init__(self.listener.url, httpx.Client(base_url=self.listener.url, timeout=300))

    def expected(self, question: str) -> str:
        """One engine's own answer over the same passages."""
        passages = self.library.search(["a", "b"], question, CONFIG.retrieve.top_k)
        return self.here.answer(question, passages[::-1]).text  # a prompt ends with the best one

    def close(self) -> None:
        self.http.close()
        self.listener.close()
        self.replicas.__exit__()
        self.here.close()


@pytest.mark.usefixtures("share")
def test_addresses_without_a_cluster_are_refused() -> None:
    """In seconds: Ray itself tries for minutes."""
    import ray

    check_address(ray.get_runtime_context().gcs_address)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        silent = f"127.0.0.1:{taken.getsockname()[1]}"
        for wrong in (silent, "nonsense", "nonsense:port", "ray://127.0.0.1:10001"):
            with pytest.raises(ClusterUnavailable):
                check_address(wrong)


@pytest.mark.nightly
def test_another_process_joins_a_cluster_that_is_large_enough(share: WorkerResources) -> None:
    import ray

    code = (
        "import sys\nfrom blendserve.ray.cluster import *\nwith cluster(sys.argv[1], int(sys.argv[2])): ..."
    )
    command = [sys.executable, "-c", code, ray.get_runtime_context().gcs_address]
    for workers, mode, failed in (("1", "token", False), ("99", "token", True), ("1", "disabled", True)):
        environment = {**os.environ, "RAY_AUTH_MODE": mode}
        done = subprocess.run([*command, workers], env=environment, capture_output=True, check=False)
        assert (done.returncode != 0, b"ClusterUnavailable" in done.stderr) == (failed, failed), done.stderr


def test_actors_make_the_same_store_as_one_process(
    share: WorkerResources, tmp_path: Path, two_nodes: bool
) -> None:
    """One of them is killed, and before it the second node with its actor, if there is one."""
    opener = OpenToy(settings(tmp_path), tmp_path / "opened", on_both=two_nodes)
    here, seen = replace(opener, log=tmp_path / "here", on_both=False), list[tuple[int, int]]()
    victims, workers = ([True, False], 3) if two_nodes else ([False], 2)

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if victims:
            opener.kill(victims.pop(0))

    with pytest.MonkeyPatch.context() as patch, here() as engine:
        patch.setattr("blendserve.ray.precompute.STACK_TOKENS", 80)  # enough stacks for all workers
        patch.setattr("blendserve.blend.precompute.FIRST_TOKEN_S", 0.0)  # a wait for the leases of the dead
        report = precompute(engine, opener, CHUNKS, workers, share, progress)
        assert not victims
        assert (report.chunks, report.left, engine.blender.writer.missing(CHUNKS)) == (len(CHUNKS), 0, [])
        assert {total for _, total in seen} == {40 * len(CHUNKS)}
        with toy_engine() as alone:
            alone.blender.writer.precompute(CHUNKS)
            assert set(alone.store.keys(None)) == set(engine.store.keys(None))
            for key in alone.store.keys(None):  # to rounding, as stacks differ
                one, other = ([kv.keys, kv.values] for e in (alone, engine) if (kv := read(e.store, key)))
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        again = precompute(engine, opener, CHUNKS, workers, share)
        assert (again.computed, again.skipped) == (0, len(CHUNKS))


@pytest.fixture(scope="module")
def made(share: WorkerResources, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingress]:
    with closing(Ingress(tmp_path_factory.mktemp("ingress"), share, 2)) as made:
        yield made


def test_the_cluster_and_its_replicas_are_reached_from_this_machine_alone(
    share: WorkerResources, made: Ingress
) -> None:
    import ray

    assert share == WorkerResources(max(1, share.cpus), 0)
    assert all(ipaddress.ip_address(node["NodeManagerAddress"]).is_loopback for node in ray.nodes())
    for line in made.opener.log.read_text().splitlines():
        assert (open_to := listening(int(line.split()[1])))
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


def test_answers_are_those_of_one_engine_whole_or_streamed(made: Ingress) -> None:
    for question in QUESTIONS:
        whole, stream = made.chat(question), made.chat(question, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert whole.choices[0].message.content == text == made.expected(question)
        assert whole.x_blendserve["timings"]["ttft"] > whole.x_blendserve["timings"]["retrieve"] > 0


def test_no_request_fails_when_a_replica_dies(made: Ingress, two_nodes: bool) -> None:
    """And before it the second node with its replica, if there is one."""
    if two_nodes:
        made.replicas.scale(3)
    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(made.chat, question) for question in asked]
        for n, victim in ((2, True), (9, False)):
            answers[n].result()
            if two_nodes or not victim:
                made.opener.kill(victim)
        texts = [answer.result().choices[0].message.content for answer in answers]
    assert texts == [made.expected(question) for question in asked]


@pytest.mark.nightly
def test_no_request_fails_while_a_replica_stops(made: Ingress) -> None:
    right = [made.expected(question) for question in QUESTIONS]
    with ThreadPoolExecutor(4) as pool:
        scaling = pool.submit(made.replicas.scale, 1)
        while not scaling.done():
            answers = pool.map(made.chat, QUESTIONS)
            assert [answer.choices[0].message.content for answer in answers] == right
        scaling.result()
    for question in QUESTIONS:  # finds its chunks in memory, sooner or later
        reports = [made.chat(question).x_blendserve["report"] for _ in range(MOST_TRIES)]
        hits = [report["tiers"] == {"local": report["chunks_hit"]} for report in reports]
        assert any(all(hits[n : n + 3]) for n in range(MOST_TRIES - 2)), reports  # a slow one is passed over
