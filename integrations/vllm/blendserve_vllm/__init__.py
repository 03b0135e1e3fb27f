"""Chunk KV inside vLLM, as a KV connector of its own: `vllm serve --kv-transfer-config '{"kv_connector": ...}'`.

    connector.py  both halves of vLLM's interface       plan.py      scheduler: prompt -> job
    blending.py   worker: a job's passes                passes.py    rows through vLLM's own model
    records.py    stored chunks of this rank            metrics.py   counters

vLLM alone imports this package. `register` is its entry point in `vllm.general_plugins`.
"""

from contextlib import suppress

CONNECTOR = "BlendConnector"


def register() -> None:
    """Make the connector's name known to vLLM; nothing else is imported before it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # vLLM loads plug-ins several times in one process
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)
