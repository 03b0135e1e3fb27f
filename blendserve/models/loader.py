"""A model by bundled name, GGUF file, local folder, hub id or `random:` shape: weights, tokenizer and fingerprint."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from torch import Tensor

from blendserve.config import ModelConfig
from blendserve.errors import ConfigError, ModelUnsupported
from blendserve.forks import begin_computing
from blendserve.kernels.cpu import isa
from blendserve.kernels.packed import PackedMatrix
from blendserve.kernels.selfcheck import widest
from blendserve.models import fast_load
from blendserve.models.chat_templates import choose
from blendserve.models.checkpoint import (
    CONFIG,
    GENERATION,
    check_folder,
    check_hub,
    check_settings,
    check_weights,
    first_line,
    loading,
    read_json,
)
from blendserve.models.dequantised import read_as_config
from blendserve.models.memory import available_on, check_fits, weight_bytes
from blendserve.models.model import DecoderModel
from blendserve.models.packing import (
    bytes_of,
    number_blocks,
    pack_weights,
    packed_bytes,
    packed_reference,
)
from blendserve.models.quantised_folder import DENSE_TYPES, dequantised_model, is_quantised, read_blocks
from blendserve.models.random import RANDOM, ModuloTokenizer, random_model, shape_config
from blendserve.models.recurrent import SEAM
from blendserve.models.reference import TextTower
from blendserve.models.refusals import TOWERS, check_supported
from blendserve.models.runner import decode_in_int8
from blendserve.models.sources import bundled_folder, quiet, source_of
from blendserve.models.tokenizer import Tokenizer, agree
from blendserve.models.weights import Weights
from blendserve.threads import limit_torch

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TEXT_PARTS = "model.language_model.", "lm_head."  # of a vision-language checkpoint
# What changes from machine to machine without changing a single KV value.
VOLATILE = {
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "use_cache")
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A language model ready to blend."""

    name: str
    decoder: DecoderModel
    tokenizer: Any
    fingerprint: str  # of configuration and weights: part of every chunk's key
    end_tokens: frozenset[int]  # any of these ends an answer
    weight_bytes: int = 0  # in memory; 0 = not known


def load_model(config: ModelConfig) -> LoadedModel:
    """Load a model. Raises ModelError, ModelUnsupported, ConfigError."""
    begin_computing()
    limit_torch(config.threads)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    with loading(config.name):
        if config.name.startswith(RANDOM):
            model = _load_random(config.name, dtype, device)
        else:
            as_is = _read_as_is(config) or _folder_as_is(config)
            model = _pack(*as_is, config.name, dtype) if as_is else _load_dense(config, dtype, device)
        if config.decode == "int8":
            decode_in_int8(model.decoder)
    return model


def read_configuration(config: ModelConfig) -> tuple[Any, torch.dtype]:
    """A model's Hugging Face configuration and the dtype it would run in, weights unread. Raises as `load_model`."""
    dtype = _dtype(config.dtype, _device(config.device))
    with loading(config.name), quiet():
        if config.name.startswith(RANDOM):
            return shape_config(config.name.removeprefix(RANDOM)), dtype
        if as_is := _read_as_is(config):
            return fast_load.Configuration(**as_is[0].config), dtype
        return _supported_config(_checked_source(config.name)).get_text_config(), dtype


def load_tokenizer(config: ModelConfig) -> Any:
    """A model's tokenizer, weights unread. Raises as `load_model`."""
    with loading(config.name), quiet():
        if config.name.startswith(RANDOM):
            shape = config.name.removeprefix(RANDOM)
            return _tokenizer_of_shape(Path(shape), shape_config(shape).vocab_size)
        if as_is := _read_as_is(config):
            return as_is[0].tokenizer
        return _tokenizer(_checked_source(config.name))


def _stays_quantised(config: ModelConfig) -> bool:
    """Whether kernels can read quantised weights, and may."""
    device = _device(config.device)
    if config.weights != "as-is" or device.type != "cpu":
        return False
    if widest("pack", _dtype(config.dtype, device)) is None:
        log.info("%s is dequantised: there are no kernels for its weights on this machine", config.name)
        return False
    return True


def _read_as_is(config: ModelConfig) -> tuple[fast_load.Start, Mapping[str, Weights]] | None:
    """A GGUF file whose weights stay as they are; None for what is no such file, or must be converted."""
    if not config.name.lower().endswith(".gguf") or not _stays_quantised(config):
        return None
    try:
        return read_as_config(Path(config.name))
    except ModelUnsupported as error:
        log.info("%s: it is converted", error)
        return None


def _folder_as_is(config: ModelConfig) -> tuple[fast_load.Start, Mapping[str, Weights]] | None:
    """A folder of GPTQ, AWQ or compressed-tensors whose weights stay quantised; None for others, and for families whose
    layers are not all in the decoder."""
    folder = Path(config.name)
    if not (folder / CONFIG).is_file() or not is_quantised(about := read_json(folder / CONFIG)):
        return None
    if about.get("model_type") not in DENSE_TYPES or not _stays_quantised(config):
        return None
    from transformers import GenerationConfig

    check_folder(folder)
    with quiet():
        own = _supported_config(str(folder))
        tokenizer = _tokenizer(folder)
        has_file = (folder / GENERATION).is_file()
        generation: Any = (
            GenerationConfig.from_pretrained(folder) if has_file else GenerationConfig.from_model_config(own)
        )
        del own.quantization_config
        weights = read_blocks(
            folder, about["quantization_config"], own, _dtype(config.dtype, _device(config.device))
        )
    ends = end_tokens(SimpleNamespace(generation_config=generation), tokenizer)
    return fast_load.Start(own.to_dict(), tokenizer, ends, None), weights


def _pack(
    start: fast_load.Start,
    weights: Mapping[str, Weights],
    name: str,
    dtype: torch.dtype,
    in_q8_0: bool = False,
) -> LoadedModel:
    """A model over quantised weights. Its fingerprint is that of the same numbers in a dense model."""
    check_fits(name, packed_bytes(weights, dtype, in_q8_0), available_on(torch.device("cpu")))
    tensors = pack_weights(weights, dtype, in_q8_0)
    config = fast_load.Configuration(**start.config)
    n_bytes = sum(map(bytes_of, tensors.values()))
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    decoder = DecoderModel(config, tensors, lambda: packed_reference(config, tensors, dtype))
    digest = _fingerprint(config, tensors)
    return LoadedModel(name, decoder, start.tokenizer, digest, start.end_tokens, n_bytes)


def _load_dense(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """A model from a folder or the hub; quantised to Q8_0 if that is asked for."""
    source = _checked_source(config.name)
    copies = config.decode == "int8" and config.weights != "q8_0"
    n_bytes = weight_bytes(Path(source), dtype, has_int8_copy=copies)
    check_fits(config.name, n_bytes, available_on(device))
    model = replace(_load(source, config.name, dtype, device), weight_bytes=n_bytes)
    if config.weights != "q8_0":
        return model
    if device.type != "cpu" or model.decoder.reference_parts:
        raise ConfigError(
            f"model.weights=q8_0 cannot be used with {config.name!r} on {device}: leave it at as-is",
            setting="model.weights",
        )
    start = fast_load.Start(model.decoder.config.to_dict(), model.tokenizer, model.end_tokens, None)
    return _pack(start, model.decoder.tensors, config.name, dtype, in_q8_0=True)


def _checked_source(name: str) -> str:
    """A folder that may hold a model, or a hub id."""
    source = source_of(name)
    if Path(source).is_dir():
        check_folder(Path(source))
    return source


def _load(source: str, name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    folder = Path(source) if device.type == "cpu" and Path(source).is_dir() else None
    if folder and (model := _fast_load(folder, name, dtype)):
        return model
    reference, tokenizer = _from_pretrained(source, dtype)
    decoder = DecoderModel.of(reference.to(device).eval())
    model = LoadedModel(name, decoder, tokenizer, fingerprint(reference), end_tokens(reference, tokenizer))
    is_plain = folder and not read_json(folder / CONFIG).get("quantization_config")
    if folder and isinstance(tokenizer, Tokenizer) and is_plain and not decoder.reference_parts:
        config = reference.config.to_dict()
        start = fast_load.Start(config, tokenizer, model.end_tokens, model.fingerprint)
        fast_load.save(folder, dtype, start)
    return model


def _fast_load(folder: Path, name: str, dtype: torch.dtype) -> LoadedModel | None:
    """The model by the record of its last start; None without one, or with other weights.

    transformers is imported when its model is asked for.
    """
    loaded = fast_load.load(folder, dtype)
    if loaded is None:
        return None
    start, tensors = loaded
    config = fast_load.Configuration(**start.config)
    digest = _fingerprint(config, tensors)
    if start.fingerprint not in {None, digest}:
        return None

    def load_reference() -> Any:
        reference, _ = _from_pretrained(str(folder), dtype)
        for called, parameter in reference.named_parameters():
            parameter.data = tensors[called]  # one copy for both
        return reference.eval()

    decoder = DecoderModel(config, tensors, load_reference)
    return LoadedModel(name, decoder, start.tokenizer, digest, start.end_tokens)


def _load_random(name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Random weights in a shape, and the bundled model's tokenizer where the shape's folder has none."""
    shape = name.removeprefix(RANDOM)
    config = shape_config(shape)
    tokenizer = _tokenizer_of_shape(Path(shape), config.vocab_size)
    log.info("Making random weights in the shape of %s", shape)
    with quiet():
        model = random_model(config, dtype, device=device)
    digest = _digest(model.config)
    digest.update(f"random, by torch {torch.__version__}".encode())  # in place of gigabytes of weights
    decoder = DecoderModel.of(model.to(device).eval())
    n_bytes = sum(x.numel() for x in model.parameters()) * dtype.itemsize
    return LoadedModel(name, decoder, tokenizer, digest.hexdigest(), end_tokens(model, tokenizer), n_bytes)


def _tokenizer_of_shape(folder: Path, vocab_size: int) -> Any:
    has_own = (folder / "tokenizer_config.json").is_file()
    tokenizer = _tokenizer(folder if has_own else bundled_folder())
    return tokenizer if len(tokenizer) <= vocab_size else ModuloTokenizer(tokenizer, vocab_size)


def _tokenizer(source: str | Path) -> Any:
    """Ours; transformers' own where it has no Rust backend, or does more than that."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(source)
    if not getattr(own, "backend_tokenizer", None):
        choose(own.chat_template, has_tools=False)  # or ModelError
        return own
    ours = Tokenizer.of(own)
    return ours if agree(ours, own) else own


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """What ends a turn: as the generation config says, and the tokenizer's own end token."""
    said = getattr(model.generation_config, "eos_token_id", None)
    ends = said if isinstance(said, list) else [said]
    return frozenset(int(i) for i in (*ends, tokenizer.eos_token_id) if i is not None)


def fingerprint(model: Any) -> str:
    """Digest of transformers' model, by its configuration and weights: equal exactly when stored KV may be shared.

    The tokenizer is no part of it: a chunk's key has the token ids.
    """
    return _fingerprint(model.config, model.state_dict())


def _fingerprint(config: Any, tensors: Mapping[str, Tensor | PackedMatrix]) -> str:
    digest = _digest(config)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        for part in number_blocks(tensor) if isinstance(tensor, PackedMatrix) else [tensor]:
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(config: Any) -> xxhash.xxh3_128:
    settings = {k: v for k, v in config.to_dict().items() if k not in VOLATILE}
    if check_supported(config).recurrent:
        settings["seam"] = SEAM  # stored state maps begin behind it
    return xxhash.xxh3_128(json.dumps(settings, sort_keys=True, default=str).encode())


def fast_dtype() -> torch.dtype:
    """bf16 where this CPU, not capped, multiplies it in hardware, else fp32: emulated bf16 is slower."""
    return torch.bfloat16 if "avx512_bf16" in isa.allowed() else torch.float32


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" else fast_dtype()


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    with suppress(RuntimeError):  # torch knows no such device
        device = torch.device(("cuda" if has_cuda else "cpu") if name == "auto" else name)
        if device.type == "cpu" or (device.type == "cuda" and has_cuda):
            return device
    raise ConfigError(
        f"setting 'model.device' cannot be {name!r}: use auto, cpu, or cuda[:n] where torch sees a CUDA device",
        setting="model.device",
    )


def _from_pretrained(source: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """transformers' model, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with quiet():
        config = _supported_config(source)  # before gigabytes of weights are read
        tokenizer = _tokenizer(source)
        is_tower = config.model_type in TOWERS
        auto: Any = AutoModelForImageTextToText if is_tower else AutoModelForCausalLM
        if is_quantised(config.to_dict()):
            return dequantised_model(source, config, dtype), tokenizer
        if quantisation := getattr(config, "quantization_config", None):
            quantisation["dequantize"] = True
        model, found = auto.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        check_weights(found, source, TEXT_PARTS if is_tower else ("",))
        if quantisation:
            model = model.to(dtype)  # dequantised weights are bf16, whatever was asked for
        return TextTower(model) if is_tower else model, tokenizer


def _supported_config(source: str) -> Any:
    from transformers import AutoConfig

    is_folder = Path(source).is_dir()
    if not is_folder:
        _ask_hub(source)
        check_hub(source)
    config = AutoConfig.from_pretrained(source)
    check_supported(config)
    if not is_folder:
        check_settings(config.to_dict(), source)
    return config


def _ask_hub(name: str) -> None:
    """Fail at once, instead of after a minute of retries, for a name that is neither cached nor reachable."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        try:
            HfApi().model_info(name, timeout=10)
        except (
            Exception
        ) as error:  # the client's own errors differ by version: all mean that it is not available
            raise OSError(
                f"there is no such folder, and the Hugging Face hub does not give it ({first_line(error)})"
            ) from error
