"""Writes a program's model object as a folder that a run starts from."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from interlace.core.errors import UserError
from interlace.observe.run_identity import DATA_FOLDER
from interlace.run.warmup_inputs import describe_content

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_model(value: object) -> bool:
    """Returns whether an object is a model of transformers, without importing transformers."""
    return all(hasattr(value, name) for name in ("save_pretrained", "config", "state_dict"))


def save_model_object(model: Any, tokenizer: Any, root: Path) -> str:
    """Writes a model and its tokenizer into `root`/data, under a name derived from both. Returns the path.

    tokenizer: If None, the tokenizer of the folder or id that the model was loaded from. Raises UserError.
    """
    if is_model(tokenizer) and not is_model(model):
        raise UserError("model=(tokenizer, model) is in the wrong order: give model=(model, tokenizer).")
    if not is_model(model):
        raise UserError(f"model is a {type(model).__name__}, not a model of transformers.")
    tokenizer = _describe_loader(model) if tokenizer is None else tokenizer
    if not hasattr(tokenizer, "apply_chat_template"):
        raise UserError(
            f"tokenizer is of type {type(tokenizer).__name__}, not a tokenizer of transformers: give the model's, as "
            "model=(model, tokenizer) or tokenizer=..."
        )
    if hasattr(model, "peft_config"):
        raise UserError(
            "model has an adapter of peft: give model.merge_and_unload(), and train a new adapter with "
            'actor={"lora": {"rank": 16}}.'
        )
    data = root.resolve() / DATA_FOLDER
    data.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole, because a program may be killed, or another one may write the same model.
    with TemporaryDirectory(prefix=".tmp-model-", dir=data) as own:
        beside = Path(own) / "tokenizer"
        tokenizer.save_pretrained(beside)
        folder = data / f"model-{_compute_digest(model, describe_content(beside))}"
        if not folder.is_dir():
            from interlace.engines.train.export import save_model

            unfinished = Path(own) / folder.name
            save_model(model, unfinished, tokenizer)
            _rename_unless_present(unfinished, folder)
    return str(folder)


def _rename_unless_present(source: Path, folder: Path) -> None:
    """Renames a folder. Leaves it if another program made `folder` in the meantime."""
    try:
        source.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _describe_loader(model: "PreTrainedModel") -> object:
    from transformers import AutoTokenizer

    source = str(getattr(model.config, "_name_or_path", "") or "")
    if not source:
        raise UserError("model is an object without a tokenizer: give model=(model, tokenizer) or tokenizer=...")
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"model is an object, and {source!r}, which it was loaded from, has no tokenizer ({reason:.120}): give "
            "model=(model, tokenizer)."
        ) from None


def _compute_digest(model: "PreTrainedModel", tokenizer: str) -> str:
    """Hashes configurations and weights of a model, and a description of its tokenizer's files."""
    import torch

    generation = getattr(model, "generation_config", None)
    texts = model.config.to_json_string(), "" if generation is None else generation.to_json_string(), tokenizer
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=8)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            digest.update(name.encode())
            digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
