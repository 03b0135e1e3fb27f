"""What is simulated: corpus, requests, nodes with their tiers, links, and what computing takes.

Sizes are bytes, times seconds, rates a second. Defaults of what computing takes are the bundled reader's on one core of
an AMD EPYC that had other work, too, rounded; `blendserve simulate --measure` finds a machine's own, and
`configs/simulate` has another reader's. Rates of links are assumptions.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from blendserve.config import AdmissionName, Positive, Ratio, Section

Routing = Literal["round_robin", "least_loaded", "prefix", "chunks"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
Amount = Annotated[float, Field(ge=0.0)]


def _some(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values:
        raise ValueError("name at least one number")
    return values


def _slower(values: tuple[float, ...]) -> tuple[float, ...]:
    if not values or values[0] < 1 or list(values) != sorted(values):
        raise ValueError("give numbers from 1 on, none smaller than the one before it")
    return values


class CorpusConfig(Section):
    """Chunks, and how often each is asked for."""

    inside = "simulate."
    chunks: Positive = Field(1_000_000, description="Let the corpus have so many chunks.")
    chunk_tokens: Positive = Field(512, description="Let a chunk have so many tokens.")
    zipf: float = Field(
        1.0,
        ge=0.0,
        description="Ask for topics, and for chunks of a topic, by this exponent of Zipf's law; 0 asks for all alike.",
    )
    topic_chunks: Positive = Field(
        64, description="Let so many chunks belong to a topic; 1 makes every chunk one of its own."
    )
    coherence: Ratio = Field(
        0.8,
        description="Draw this share of a request's chunks from one topic, and the others from the whole corpus.",
    )
    lifetime: int = Field(
        0,
        ge=0,
        description="Give what is popular to another topic after so many requests, each at its own time; 0 lets it be.",
    )


class RequestsConfig(Section):
    """What is asked, and when."""

    inside = "simulate."
    number: Positive = Field(20_000, description="Simulate so many requests.")
    warm_up: float = Field(
        0.5, ge=0.0, lt=1.0, description="Leave this share of the requests, the first, out of all figures."
    )
    rate: Amount = Field(
        0.5,
        description="Let so many requests a second and node come by a Poisson process; 0 is a closed loop of clients.",
    )
    clients: Positive = Field(
        2, description="In a closed loop, let so many clients a node ask again as soon as they are answered."
    )
    chunks: Positive = Field(6, description="Give a request so many different chunks.")
    prefix_tokens: int = Field(32, ge=0, description="Begin every prompt with so many stored tokens.")
    question_tokens: Positive = Field(32, description="End every prompt with so many tokens of its own.")
    answer_tokens: int = Field(32, ge=0, description="Answer with so many tokens.")


class TiersConfig(Section):
    """What a node keeps, and what all of them share."""

    inside = "simulate."
    memory_bytes: Amount = Field(2e9, description="Keep decoded chunks in so many bytes of a node's memory.")
    disk_bytes: Amount = Field(
        0.0, description="Keep chunks, as stored, on so many bytes of a node's own disk."
    )
    remote_bytes: Amount | Literal["all"] = Field(
        "all",
        description="Share a store of so many bytes; all keeps whatever was ever computed, 0 shares nothing.",
    )
    precomputed: bool = Field(
        True, description="Begin with the whole corpus in the shared store, which has to hold all."
    )
    admission: AdmissionName = Field(
        "always",
        description="Let into a node's full tiers whatever comes, by LRU (always), or by the engine's own rule.",
    )


class LinksConfig(Section):
    """How chunks move. A rate of 0 is no limit."""

    inside = "simulate."
    disk_rate: Amount = Field(1e9, description="Read a node's own disk at so many bytes a second.")
    disk_delay: Amount = Field(1e-4, description="Wait so long for its first byte.")
    node_rate: Amount = Field(1.25e9, description="Bring so many bytes a second to a node, at most.")
    store_rate: Amount = Field(
        0.0, description="Take so many bytes a second from the shared store for all nodes together."
    )
    delay: Amount = Field(1e-3, description="Wait so long for the shared store's first byte.")


class ComputeConfig(Section):
    """Seconds of a node's work: of a prefill as the engine's cost model counts them, and of what is around it."""

    inside = "simulate."
    per_pass: Amount = Field(0.05, description="For a pass over the layers.")
    per_row: Amount = Field(1.2e-3, description="For a token row through all layers.")
    per_pair: Amount = Field(3.8e-7, description="For a row and a key that it attends to.")
    per_loaded: Amount = Field(
        1.2e-5, description="For a stored token that is read from memory, rotated and placed."
    )
    per_decoded: Amount = Field(0.0, description="For a stored token of a codec that is decoded.")
    per_fetched: Amount = Field(
        0.0,
        description="For a stored token that comes from the shared store: what a node's cores do for it while it is on "
        "its way.",
    )
    fixed: Amount = Field(0.008, description="For tokenising, searching and routing a request.")
    per_answer_token: Amount = Field(
        0.0, description="For an answer's token, as the share of a step that its request has in a batch."
    )
    per_stored: Amount = Field(
        4.5e-4,
        description="For a token of a missing chunk that is computed alone and stored behind an answer, beside the pass "
        "that all of an answer's missing chunks share.",
    )
    slowdown: Annotated[tuple[float, ...], AfterValidator(_slower)] = Field(
        (1.0,),
        description="Let so many nodes share a machine as there are numbers here; while n of them compute, let the work "
        "of each take the n-th number times as long.",
    )
    raw_bytes: Positive = Field(
        23_040, description="Let a token's keys and values take so many bytes uncoded."
    )
    stored_bytes: Positive = Field(23_040, description="Let them take so many as they are stored and sent.")
    ratio: Ratio = Field(0.05, description="Recompute this share of the found tokens.")
    scoring_pass: bool = Field(
        True, description="Run the question's rows once more, to choose what is recomputed."
    )


class SimulateConfig(Section):
    """One cluster, by every way of routing."""

    nodes: Annotated[tuple[Positive, ...], AfterValidator(_some)] = Field(
        (4,), description="Simulate clusters of so many nodes."
    )
    routing: tuple[Routing, ...] = Field(ROUTINGS, description="Compare these ways of routing.")
    bound: float = Field(
        1.5,
        gt=1.0,
        description="By prefix and by chunks, give a node at most so many times its fair share of requests, rounded "
        "down, or one more than the least loaded has.",
    )
    seed: int = Field(0, description="Draw by this seed.")
    corpus: CorpusConfig = CorpusConfig()
    requests: RequestsConfig = RequestsConfig()
    tiers: TiersConfig = TiersConfig()
    links: LinksConfig = LinksConfig()
    compute: ComputeConfig = ComputeConfig()
