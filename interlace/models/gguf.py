"""Conversion of GGUF files, once per file, to Hugging Face folders that load fast and can be saved again."""

import hashlib
import importlib.util
import shutil
import tempfile
from pathlib import Path

from interlace.core.errors import UserError
from interlace.models.transformers_lock import TRANSFORMERS_LOCK

FORMAT = 1
"""Part of the cache's key; raised when the conversion changes."""


def convert_gguf(file: Path, cache_dir: Path) -> Path:
    """Returns the Hugging Face folder of a GGUF file. It is created on first use and cached by the file's content.

    Raises UserError if a required package is missing or transformers cannot read the file.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{file} needs {' and '.join(missing)}: pip install 'interlace[gguf]'.")
    target = cache_dir / "gguf" / f"{file.stem}-{_hash_file(file)}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Write to a temporary folder and rename it, so that an interrupted conversion is never taken for a complete one.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        _convert_file(file, Path(scratch) / "model")
        try:
            (Path(scratch) / "model").rename(target)
        except OSError:
            if not target.is_dir():  # Otherwise another process finished the same conversion first.
                raise
    return target


def _hash_file(file: Path) -> str:
    with file.open("rb") as data:
        content = hashlib.file_digest(data, "blake2b").hexdigest()
    return hashlib.blake2b(f"{FORMAT} {content}".encode(), digest_size=8).hexdigest()


def _convert_file(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": file.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(str(file.parent), **source)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **source)
        with TRANSFORMERS_LOCK:
            quantized = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **source)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise UserError(f"{file} cannot be read as a causal language model: {error}") from error
    # A model read from GGUF is still marked as quantized and refuses to be saved, although its weights are dequantized.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with TRANSFORMERS_LOCK, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict(), assign=True)
    with TRANSFORMERS_LOCK:  # another thread may have replaced this method for the duration of a load
        model.tie_weights()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
