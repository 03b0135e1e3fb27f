"""Settings of a simulation: corpus, requests, tiers, links and compute times.

Sizes are in bytes, times in seconds, rates per second. The default compute times are those of the bundled model on one
core of a loaded AMD EPYC, rounded; `blendserve simulate --measure` measures another machine, and `configs/simulate` has
another model's. Link rates are assumptions.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from blendserve.config import AdmissionName, Positive, Ratio, Settings

Routing = Literal["round_robin", "least_loaded", "prefix", "chunks"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
Amount = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


def _slowdown(values: tuple[float, ...]) -> tuple[float, ...]:
    if not values or values[0] < 1 or list(values) != sorted(values):
        raise ValueError("give numbers from 1 on, none smaller than the one before it")
    return values


class CorpusConfig(Settings):
    """Chunks and their popularity."""

    prefix = "simulate."
    chunks: Positive = Field(1_000_000, description="Number of chunks in the corpus.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    zipf: Amount = Field(
        1.0, description="Zipf exponent of the popularity of topics, and of a topic's chunks; 0 is uniform."
    )
    topic_chunks: Positive = Field(64, description="Number of chunks per topic; 1 makes every chunk a topic.")
    coherence: Ratio = Field(
        0.8, description="Fraction of a request's chunks from one topic; the others are of the whole corpus."
    )
    lifetime: Count = Field(
        0,
        description="Number of requests after which a rank of popularity moves to another topic; 0 is never.",
    )


class RequestsConfig(Settings):
    """Requests and their arrivals."""

    prefix = "simulate."
    number: Positive = Field(20_000, description="Number of requests.")
    warm_up: float = Field(
        0.5, ge=0.0, lt=1.0, description="Fraction of first requests that are not counted."
    )
    rate: Amount = Field(
        0.5, description="Poisson arrivals, in requests per second and node; 0 is a closed loop of clients."
    )
    clients: Positive = Field(2, description="Number of clients per node in a closed loop.")
    chunks: Positive = Field(6, description="Number of different chunks in a request.")
    prefix_tokens: Count = Field(32, description="Length of the cached prefix of a prompt, in tokens.")
    question_tokens: Positive = Field(32, description="Length of the question, in tokens.")
    answer_tokens: Count = Field(32, description="Length of an answer, in tokens.")


class TiersConfig(Settings):
    """Caches of a node, and the store that all nodes share."""

    prefix = "simulate."
    memory_bytes: Amount = Field(2e9, description="A node's cache of decoded chunks in memory, in bytes.")
    disk_bytes: Amount = Field(0.0, description="A node's cache of coded chunks on its disk, in bytes.")
    remote_bytes: Amount | Literal["all"] = Field(
        "all", description="Shared store, in bytes; all keeps every computed chunk, 0 means no shared store."
    )
    precomputed: bool = Field(
        True, description="Start with the whole corpus in the shared store, which must hold all of it."
    )
    admission: AdmissionName = Field(
        "always", description="Admission policy of full caches: always (plain LRU) or the engine's own."
    )


class LinksConfig(Settings):
    """Rates and latencies. A rate of 0 is no limit."""

    prefix = "simulate."
    disk_rate: Amount = Field(
        1e9, description="Read rate of a node's disk, in bytes per second; 0 is unlimited."
    )
    disk_delay: Amount = Field(1e-4, description="Latency of a node's disk, in seconds.")
    node_rate: Amount = Field(
        1.25e9, description="Network rate of a node, in bytes per second; 0 is unlimited."
    )
    store_rate: Amount = Field(
        0.0, description="Rate of the shared store for all nodes, in bytes per second; 0 is unlimited."
    )
    delay: Amount = Field(1e-3, description="Latency of the shared store, in seconds.")


class ComputeConfig(Settings):
    """Seconds of a node's work: the terms of the engine's cost model, and the work around a prefill."""

    prefix = "simulate."
    per_pass: Amount = Field(0.05, description="Seconds of a pass over the layers.")
    per_row: Amount = Field(1.2e-3, description="Seconds per token row through all layers.")
    per_pair: Amount = Field(3.8e-7, description="Seconds per pair of a row and a key that it attends to.")
    per_loaded: Amount = Field(
        1.2e-5, description="Seconds per cached token to read, rotate and place its KV."
    )
    per_decoded: Amount = Field(0.0, description="Seconds per cached token to decode its KV.")
    per_fetched: Amount = Field(0.0, description="CPU seconds per token fetched, during its transfer.")
    fixed: Amount = Field(0.008, description="Seconds per request for tokenization, retrieval and routing.")
    per_answer_token: Amount = Field(0.0, description="Seconds per answer token, of a batched decoding step.")
    per_stored: Amount = Field(
        4.5e-4, description="Seconds per token of a missing chunk to compute and store it after an answer."
    )
    slowdown: Annotated[tuple[float, ...], AfterValidator(_slowdown)] = Field(
        (1.0,),
        description="Slowdown of the nodes of a machine while 1, 2, ... of them compute; a number for each node.",
    )
    raw_bytes: Positive = Field(23_040, description="Size of a token's uncoded KV, in bytes.")
    stored_bytes: Positive = Field(23_040, description="Size of a token's KV as stored and sent, in bytes.")
    ratio: Ratio = Field(0.05, description="Fraction of the cached tokens to recompute.")
    scoring_pass: bool = Field(True, description="Run the question's rows once more to select tokens.")


class SimulateConfig(Settings):
    """One cluster, by every routing method."""

    nodes: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        (4,), description="Numbers of nodes to simulate."
    )
    routing: tuple[Routing, ...] = Field(ROUTINGS, description="Routing methods to compare.")
    bound: float = Field(
        1.5,
        gt=1.0,
        description="Maximum load of a node under routing by prefix and by chunks, as a multiple of the average load.",
    )
    seed: int = Field(0, description="Random seed.")
    corpus: CorpusConfig = CorpusConfig()
    requests: RequestsConfig = RequestsConfig()
    tiers: TiersConfig = TiersConfig()
    links: LinksConfig = LinksConfig()
    compute: ComputeConfig = ComputeConfig()
