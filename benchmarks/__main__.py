"""`python -m benchmarks NAME`, from a checkout: benches that prove claims about networks, failures and neighbors.

Options and output are those of `blendserve bench`. Every claim is in claims.yaml; `blendserve bench suite` runs them.
"""

from __future__ import annotations

import sys

from blendserve.cli.app import run
from blendserve.cli.bench import bench_app

BENCHES = {  # name, also that of the module -> help
    "network": "Load KV over networks, against recomputing it.",
    "delivery": "Deliver KV over changing links, against fixed levels and CacheGen.",
    "sharing": "Compare a cache per user with one shared cache.",
    "noisy_neighbor": "Run one hostile client beside a server's regular clients.",
    "cpu_contention": "Prefill and decode while other processes use the CPUs.",
    "sampling": "Choose tokens from a large vocabulary, by rule and by grammar.",
    "index_size": "Search, add and delete in indexes of many passages.",
    "startup": "Time whole commands, and the first answer of a process.",
    "near_duplicates": "Ask about passages that were edited after they were cached.",
    "passage_order": "Estimate what passages in the order of kept KV would save.",
    "run_offsets": "Compare runs from inside of stored chunks with full prefill.",
    "engines": "Decode by blendserve, transformers and llama.cpp in turns.",
    "quantised": "Run a GGUF file as it is, in bf16 and by llama.cpp; and what decoding loses.",
    "ray_routing": "Route by chunk affinity on a Ray cluster, against Ray's default.",
    "plain": "Find stored text in the prompts of unchanged clients.",
    "traffic": "Learn from plain prompts, and keep conversations with agents.",
    "quality": "Calibrate a target of quality, and see whether other prompts keep it.",
    "auto": "Compare method auto with the best fixed method.",
    "vllm_connector": "Serve by vLLM with the connector, against the same vLLM without it.",
}

if __name__ == "__main__":
    sys.exit(run(bench_app("Measure what the project claims.", BENCHES, "benchmarks.")))
