"""Low-rank adapters (LoRA, arXiv 2106.09685) in a model, through peft: the only trained part of the model.

A linear layer computes W x + (alpha / rank) B A x. W stays unchanged, so with the adapter off the model is the one that
training started from, and the reference needs no separate weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.engines.train.checkpoint import host_copy
from interlace.engines.train.export import ADAPTER_FOLDER, list_named_weights
from interlace.engines.train.ranks import whole_tensor
from interlace.weights.content import content_hash
from interlace.weights.ref import FACTORS, AdapterBase
from interlace.weights.shards import local_part, shards_of

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    from interlace.engines.train.config import LoraConfig

NAME = "default"
"""Name of the adapter: peft's default."""
PREFIX = "base_model.model."
"""Prefix of each name in an adapter's file, because there the adapter belongs to peft's wrapper around the model."""
WEIGHTS_FILE, SETTINGS_FILE = "adapter_model.safetensors", "adapter_config.json"
BASE = ".base_layer"
"""Infix between a layer's name and `weight` for the frozen weight of a layer with an adapter."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterFiles:
    """A folder that peft's `PeftModel.from_pretrained` loads onto the base model."""

    tensors: dict[str, Tensor]
    settings: peft.LoraConfig

    def write(self, folder: Path) -> None:
        """Writes into ADAPTER_FOLDER of the model's folder."""
        from safetensors.torch import save_file

        own = folder / ADAPTER_FOLDER
        own.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, own / WEIGHTS_FILE, metadata={"format": "pt"})
        self.settings.save_pretrained(str(own))


class Adapter:
    """LoRA layers inside a model."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LoraConfig,
        *,
        seed: int,
        base_name: str | None = None,
        head: str | None = None,
    ) -> None:
        """Inserts the layers, which initially change nothing (B = 0), and freezes all other parameters.

        seed: seed of A and of dropout. base_name: portable name of the model, for adapter_config.json. If None, the
        name that transformers loaded the model by. head: name of a classifier's head, a linear layer whose weight is
        trained whole and belongs to the adapter's files (peft's `modules_to_save`). If None, the model is a causal
        language model. Raises UserError if peft is missing, or if no linear layer has a given name.
        """
        self._model, self._seed, self._head = model, seed, head
        self._settings, self._layers = _inject_adapter(model, config, head)
        self._settings.base_model_name_or_path = base_name or model.config._name_or_path or None
        self._generator = torch.Generator()
        self._dropouts = [_Dropout(config.dropout, self._generator) for _ in self._layers]
        initial = torch.Generator().manual_seed(stable_hash("lora", seed))
        for layer, dropout in zip(self._layers.values(), self._dropouts, strict=True):
            with torch.no_grad():
                nn.init.kaiming_uniform_(layer.lora_A[NAME].weight, a=math.sqrt(5), generator=initial)
            layer.lora_dropout[NAME] = dropout

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self._enable_adapters(False)
        try:
            yield
        finally:
            self._enable_adapters(True)

    @contextmanager
    def enable_dropout(self, *key: int) -> Iterator[None]:
        """Enables dropout inside the context, with noise determined by the seed and the key."""
        self._generator.manual_seed(stable_hash("lora dropout", self._seed, *key))
        for dropout in self._dropouts:
            dropout.train()
        try:
            yield
        finally:
            for dropout in self._dropouts:
                dropout.eval()

    @torch.no_grad()
    def merge_weights(self) -> Mapping[str, Tensor]:
        """Computes all weights of the model with the adapter merged, by the names of the model without adapter.

        Tensors of layers with an adapter are new; the others alias the model's, which never change.
        """
        weights = {
            name.replace(BASE, ""): tensor
            for name, tensor in list_named_weights(self._model).items()
            if ".lora_" not in name
        }
        for name, layer in self._layers.items():
            weight = layer.base_layer.weight
            weights[f"{name}.weight"] = (weight + layer.get_delta_weight(NAME)).to(weight.dtype)
        return weights

    @cached_property
    def base(self) -> AdapterBase:
        """Describes the frozen base of the adapter: this rank's part of the adapted layers' weights."""
        weights = {f"{name}.weight": layer.base_layer.weight for name, layer in self._layers.items()}
        first = next(iter(self._layers.values()))
        return AdapterBase(
            scale=first.scaling[NAME],
            is_turned=first.fan_in_fan_out,
            shards=shards_of(weights),
            checksum=content_hash(map(local_part, weights.values())),
        )

    def copy_to_host(self) -> AdapterFiles:
        """Copies the adapter's current state to the host; with several ranks, all must call this method."""
        tensors = {
            f"{PREFIX}{name}": host_copy(whole_tensor(tensor)).contiguous() for name, tensor in self.tensors.items()
        }
        return AdapterFiles(tensors=tensors, settings=self._settings)

    def load(self, folder: Path) -> None:
        """Loads a saved adapter. Raises UserError if it has other layers or another rank."""
        from safetensors.torch import load_file

        found = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
        own = self.tensors
        if {name: tensor.shape for name, tensor in found.items()} != {name: own[name].shape for name in own}:
            raise UserError(
                f"the adapter in {folder} has other layers or another rank than actor.lora says: resume with the run's "
                "own config.yaml."
            )
        with torch.no_grad():
            for name, tensor in found.items():
                own[name].copy_(tensor)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Returns the adapter's tensors by the names in peft's files; they alias the model's."""
        found = {
            f"{name}.{half}.weight": getattr(layer, half)[NAME].weight.detach()
            for name, layer in self._layers.items()
            for half in FACTORS
        }
        if self._head is not None:
            found[f"{self._head}.weight"] = self._model.get_parameter(f"{self._head}.weight").detach()
        return found

    def _enable_adapters(self, enabled: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(enabled)


def num_lora_parameters(model: nn.Module, config: LoraConfig) -> int:
    """Counts an adapter's parameters without a head; the model may be on meta. Raises UserError as Adapter does."""
    shapes = [module.weight.shape for module in _find_targets(model, config).values()]
    return sum(config.rank * (rows + columns) for rows, columns in shapes)


def num_adapted_parameters(model: nn.Module, config: LoraConfig) -> int:
    """Counts the parameters of the layers that get an adapter; see num_lora_parameters."""
    return sum(module.weight.numel() for module in _find_targets(model, config).values())


class _Dropout(nn.Module):
    """Dropout with a separate generator, because all threads of the process share torch's global one."""

    def __init__(self, rate: float, generator: torch.Generator) -> None:
        super().__init__()
        self.rate, self.generator = rate, generator
        self.eval()

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return rows
        kept = torch.rand(rows.shape, generator=self.generator).to(rows.device) >= self.rate
        return rows * kept / (1 - self.rate)


def _inject_adapter(
    model: PreTrainedModel, config: LoraConfig, head: str | None
) -> tuple[peft.LoraConfig, dict[str, Any]]:
    """Returns (peft's settings, the adapter's layers by the name of the layer they replace)."""
    targets = _find_targets(model, config, head)
    import peft

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only divides it by the rank
        target_modules=list(targets),
        fan_in_fan_out=any(not isinstance(module, nn.Linear) for module in targets.values()),
        task_type="CAUSAL_LM" if head is None else "SEQ_CLS",
    )
    peft.inject_adapter_in_model(settings, model, adapter_name=NAME)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in targets}
    _check_adapted(model, layers)
    for layer in layers.values():
        for half in (layer.lora_A, layer.lora_B):
            half[NAME].float().requires_grad_(True)  # small, and trained: full precision
    if head is not None:
        _train_head(model.get_submodule(head))
        settings.modules_to_save = [head]  # after the injection, which would wrap the head
    return settings, layers


def _check_adapted(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raises UserError for layers without an adapter. peft takes their names for names of the model's experts, of which
    transformers stacks the matrices, and gives the experts an adapter instead."""
    lacking = [name for name, layer in layers.items() if not hasattr(layer, "lora_A")]
    if lacking:
        fitting = dict.fromkeys(name.rpartition(".")[2] for name in layers if name not in lacking)
        raise UserError(
            f"actor.lora: peft gives {len(lacking)} layers of {type(model).__name__} no adapter, such as {lacking[0]}, "
            f"because it takes them for experts. Set actor.lora.target_modules to some of {', '.join(fitting)}."
        )


def _train_head(head: nn.Module) -> None:
    """Trains the weight of a linear head in float32, in which the head also computes."""
    head.float().get_parameter("weight").requires_grad_(True)
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))


def _find_targets(model: nn.Module, config: LoraConfig, head_name: str | None = None) -> dict[str, nn.Linear | Conv1D]:
    """Finds linear layers by their full name. head_name: name of a classifier's head, which gets no adapter."""
    if find_spec("peft") is None:
        raise UserError("actor.lora needs peft, which is not installed: pip install 'interlace[lora]'.")
    from transformers.pytorch_utils import Conv1D

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head = linear[head_name] if head_name else model.get_output_embeddings()  # type: ignore[operator]  # transformers'
    short = {name.rpartition(".")[2]: module for name, module in linear.items() if module is not head}
    wanted = config.target_modules or tuple(short)
    unknown = [name for name in wanted if name not in short]
    if unknown:
        raise UserError(
            f"actor.lora.target_modules = {list(wanted)}: {type(model).__name__} has no linear layer "
            f"{unknown[0]!r} that can have an adapter. It has {', '.join(short)}."
        )
    return {name: module for name, module in linear.items() if name.rpartition(".")[2] in wanted and module is not head}
