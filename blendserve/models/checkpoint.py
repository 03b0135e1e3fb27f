"""What can be wrong with a model's files. Each is a ModelError with the name of the file and the remedy."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blendserve.errors import BlendserveError, ModelError

log = logging.getLogger(__name__)

CONFIG, ADAPTER, GENERATION = "config.json", "adapter_config.json", "generation_config.json"
# transformers makes plain weights of the first two while it loads them, quantised_folder.py of the others.
DEQUANTISED = {"fp8", "mxfp4", "gptq", "awq", "compressed-tensors"}
MAX_LAYERS = 10_000  # a model of that many is a damaged config.json, and takes hours to make
NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")  # in torch's RuntimeErrors


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn whatever fails while a model is loaded into a ModelError, but for the errors of this package.

    Files of other programs make every class of error, in json, safetensors, tokenizers, torch and transformers, and
    Rust's panics, which are no Exception. The error itself is kept as the cause: `blendserve --verbose` prints it.
    """
    try:
        yield
    except (BlendserveError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelError(_reason(name, error), setting="model.name", path=name) from error


def _reason(name: str, error: BaseException) -> str:
    said = first_line(error)
    kind = type(error).__name__
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        return (
            f"model {name!r} does not fit into memory ({said}): use a smaller model, or a machine with more. "
            "If memory is free, look at the limit on address space (ulimit -v)"
        )
    told = said if isinstance(error, (OSError, ValueError)) else f"{kind}: {said}"
    return (
        f"model {name!r} cannot be loaded: {told}. Fetch its files again, or give another model: a folder with "
        "config.json, weights and tokenizer, a .gguf file, a hub id while online, or a bundled name"
    )


def first_line(error: BaseException) -> str:
    """An error's message without what follows its first line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def check_folder(folder: Path) -> None:
    """Raise ModelError for a folder that is no whole model, by its small files. Nothing slow is imported."""
    adapter = folder / ADAPTER
    if adapter.is_file():
        raise _is_adapter(adapter, read_json(adapter).get("base_model_name_or_path"))
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder} is not a model folder: it has no {CONFIG}: give a folder with {CONFIG}, weights and tokenizer",
            setting="model.name",
            path=folder,
        )
    check_settings(read_json(folder / CONFIG), folder / CONFIG)
    if (folder / GENERATION).exists():
        # transformers would ignore one that is broken, and with it the end tokens
        read_json(folder / GENERATION)


def check_hub(name: str) -> None:
    """Raise ModelError for a hub id that is an adapter."""
    from transformers.utils.peft_utils import find_adapter_config_file

    if found := find_adapter_config_file(name):
        raise _is_adapter(Path(found), read_json(Path(found)).get("base_model_name_or_path"))


def _is_adapter(file: Path, base: Any) -> ModelError:
    return ModelError(
        f"{file.parent} has an adapter (LoRA) of {str(base)!r}, which would be ignored: merge it into that model "
        "(`merge_and_unload` and `save_pretrained` of the package peft) and give the merged folder. "
        f"If the weights are merged already, remove {file.name}",
        setting="model.name",
        path=file,
    )


def read_json(file: Path) -> dict[str, Any]:
    """A file's JSON object. Raises ModelError."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {first_line(error)}. Fetch it again", path=file) from error
    if not isinstance(values, dict):
        raise ModelError(
            f"{file} holds a {type(values).__name__}, not a JSON object: fetch it again", path=file
        )
    return values


def check_settings(config: Mapping[str, Any], file: object) -> None:
    """Raise ModelError for a configuration that no weights can make right."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        n_layers = part.get("num_hidden_layers")
        if isinstance(n_layers, int) and not 0 < n_layers <= MAX_LAYERS:
            raise ModelError(
                f"{file} says num_hidden_layers {n_layers}, which must be 1 to {MAX_LAYERS:,}: fetch it again",
                setting="num_hidden_layers",
                path=file,
            )
        if method := _quantisation(part.get("quantization_config")):
            raise ModelError(
                f"{file} says that the weights are quantised by {method}, which is not supported: use the model's "
                f"unquantised folder, a GGUF file of it, or one of these methods: {', '.join(sorted(DEQUANTISED))}",
                setting="quantization_config",
                path=file,
            )


def _quantisation(about: Any) -> str | None:
    """The name of a quantisation that is not supported; None without one."""
    if not about:
        return None
    method = about.get("quant_method") if isinstance(about, Mapping) else None
    if method is None and isinstance(about, Mapping):
        method = next((name for name in ("load_in_4bit", "load_in_8bit") if about.get(name)), None)
    return None if method in DEQUANTISED else str(method or "an unknown method")


def check_weights(found: Mapping[str, Collection[Any]], path: object, parts: tuple[str, ...] = ("",)) -> None:
    """Refuse weights that the model needs and the files lack: transformers draws them at random.

    found: transformers' `output_loading_info`. parts: beginnings of the names of weights that are used.
    Raises ModelError; warns of weights that the model has no place for.
    """
    missing = sorted(name for name in found["missing_keys"] if name.startswith(parts))
    unexpected = sorted(found["unexpected_keys"])
    extra = f"{unexpected[0]!r}{_others(unexpected)}" if unexpected else ""
    if missing:
        instead = f", and weights that the model has no place for, {extra}" if extra else ""
        raise ModelError(
            f"{path} has no weights {missing[0]!r}{_others(missing)}{instead}: fetch its files again, rename the "
            "weights as transformers names them, or mend config.json",
            setting="model.name",
            path=path,
        )
    for name, has, needs in sorted(found["mismatched_keys"]):
        raise ModelError(
            f"{path} has weights {name!r} of shape {tuple(has)}, and its config.json says {tuple(needs)}"
            f"{_others(found['mismatched_keys'])}: the files do not belong together, fetch them again",
            setting="model.name",
            path=path,
        )
    if unexpected:
        log.warning("%s has weights that the model does not use: %s", path, extra)


def _others(names: Collection[Any]) -> str:
    return f" and {len(names) - 1:,} more" if len(names) > 1 else ""
