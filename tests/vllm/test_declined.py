"""Set-ups of vLLM in which nothing is blended, each with a reason; vLLM serves them as if there were no connector."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from blendserve.errors import ConfigError
from tests.support.vllm import World

CHANGES = [
    ("parallel_config", "pipeline_parallel_size", 2),
    ("parallel_config", "decode_context_parallel_size", 2),
    ("parallel_config", "prefill_context_parallel_size", 2),
    ("kv_transfer_config", "kv_load_failure_policy", "fail"),
    ("cache_config", "kv_sharing_fast_prefill", True),
]


@pytest.mark.parametrize(("section", "field", "value"), CHANGES, ids=lambda value: str(value))
def test_a_set_up_that_is_not_supported_has_a_reason(
    world: World, section: str, field: str, value: object
) -> None:
    from blendserve_vllm.connector import declined

    config, caches = (
        copy.copy(world.served.llm.llm_engine.vllm_config),
        world.served.scheduler.kv_cache_config,
    )
    assert declined(config, caches) == ""
    part = copy.copy(getattr(config, section))
    setattr(part, field, value)
    setattr(config, section, part)
    assert declined(config, caches) != ""


@pytest.mark.parametrize("version", ["0.11.0", "0.34.1", "1.0", "unknown"])
def test_an_unknown_version_has_a_reason(world: World, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from blendserve_vllm.connector import declined

    config, caches = world.served.llm.llm_engine.vllm_config, world.served.scheduler.kv_cache_config
    monkeypatch.setattr(vllm, "__version__", version)
    assert version in declined(config, caches)


@pytest.mark.parametrize(
    "extra", [{}, {"store": "kv", "sotre": 1}, {"store": "kv", "slice_tokens": -1}], ids=str
)
def test_wrong_settings_are_refused(world: World, extra: dict[str, object]) -> None:
    from blendserve_vllm.options import ConnectorOptions

    with pytest.raises(ConfigError):
        ConnectorOptions.of(extra)


@pytest.mark.parametrize("field", ["mm_features", "pooling_params", "prompt_embeds", "resumable"])
def test_a_request_of_another_kind_is_not_planned(world: World, field: str) -> None:
    """As the scheduler hands it over: the connector has no plan for it, and claims nothing."""
    connector, ids = world.served.scheduler.connector, world.prompt(0, 1, 2)
    plain: dict[str, object] = {"mm_features": [], "prompt_embeds": None, "pooling_params": None}
    plain |= {"resumable": False, "skip_reading_prefix_cache": False, "kv_transfer_params": None}
    for name, special in (("plain", {}), ("special", {field: [1]})):
        request = SimpleNamespace(
            request_id=name, prompt_token_ids=ids, block_hashes=[], **{**plain, **special}
        )
        connector.on_new_request(request)
        n_claimed, _ = connector.get_num_new_matched_tokens(request, 0)
        assert (n_claimed > 0) == (name == "plain")
        connector.request_finished(request, [])
