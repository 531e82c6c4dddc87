"""Tensor parallelism (arXiv 1909.08053): layers sharded over several ranks by transformers' plan of the model.

A layer's parameter is a DTensor, sharded along one dimension. During the computation the layer sees this rank's part as
a plain tensor, so any kernel works. Between a layer that is sharded by outputs and one that is sharded by inputs, each
rank has different heads, or different columns of the MLP; everything else is bit-identical on every rank. Logits stay
sharded by vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from interlace.core.errors import UserError
from interlace.models.collectives import add_gradients, add_up, gather_parts
from interlace.models.size import list_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

COLUMNS, ROWS, GRADIENT, EXPERTS = "colwise", "rowwise", "replicated_with_grad_allreduce", "moe_tp_experts"
"""Styles of transformers' plans that this module supports."""
INSIDE_EXPERTS = ("packed_colwise", COLUMNS, ROWS)
"""Styles of the tensors within EXPERTS, which this module shards by expert."""
EXPERT_INPUTS = ("hidden_states", "top_k_index", "top_k_weights")
COUNTS = ("num_attention_heads", "num_key_value_heads")
HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
"""Names of norms within each head. Each rank applies them to other heads, which some plans (GLM-4.5, Phi) leave out."""
ACTIVATION = "act_fn"
"""Name of the activation between a layer's matrices. Its parameters, if it has some (Apertus), are in no plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyPart:
    """This rank's columns of the logits, and the mesh of ranks that have the other columns."""

    mesh: DeviceMesh
    first: int


def check_plan(model: PreTrainedModel, size: int, setting: str) -> None:
    """Raises UserError if the model's layers cannot be sharded over `size` ranks. The model may be on the meta device.

    setting: key of the recipe, for the message.
    """
    if size == 1:
        return
    check_heads(model, size, setting)
    name = type(model).__name__
    for module, style in _find_styles(model).items():
        if style == EXPERTS:
            num_experts = _num_experts(model.get_submodule(module))
            if num_experts % size:
                raise UserError(
                    f"{setting}={size}, but {name} has {num_experts} experts a layer: set it to a divisor of that."
                )
            continue
        if style == GRADIENT:
            continue
        rows, columns = _read_weight(model.get_submodule(module)).shape
        if (style == COLUMNS and rows % size) or (style == ROWS and columns % size):
            raise UserError(
                f"{setting}={size}, but {module} of {name} is {rows} x {columns}, which cannot be cut evenly. Set "
                f"{setting} to a divisor."
            )


def check_heads(model: PreTrainedModel, size: int, setting: str) -> None:
    """Raises UserError if the attention heads cannot be divided among `size` ranks; see check_plan."""
    layers = list_layers(model.config)
    for count in COUNTS:
        numbers = {getattr(layer, count, None) or 0 for layer in layers}
        if number := next((each for each in sorted(numbers) if each % size), None):
            raise UserError(
                f"{setting}={size}, but {type(model).__name__} has {count}={number}, which cannot be shared out "
                f"evenly. Set {setting} to a divisor of {number}."
            )


def share_layers(model: PreTrainedModel, mesh: DeviceMesh) -> VocabularyPart | None:
    """Shards the layers of a whole model that is equal on every rank of the mesh. Returns this rank's part of the
    logits.

    Returns None if the model has no head over the vocabulary. The model may be on the meta device.
    """
    styles = _find_styles(model)
    for name, style in styles.items():
        module = model.get_submodule(name)
        _SHARING[style](module, mesh)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    num_rows, part = _read_weight(embedding).shape[0], None
    if head is not None:
        is_tied, num_outputs = head.weight is embedding.weight, _read_weight(head).shape[0]
        _share_by_columns(head, mesh)
        part = VocabularyPart(mesh=mesh, first=_first_row(num_outputs, mesh))
        if is_tied:
            embedding.weight = head.weight
    _share_lookup(embedding, mesh, num_rows)
    return part


def gather_logits(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Makes a sharded model return whole logits on every rank, for sampling. The result has no gradients."""
    head = model.get_output_embeddings()
    num_columns = _read_weight(head).shape[0]
    each = -(-num_columns // mesh.size())

    def gather(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        del module, args
        parts = gather_parts(nn.functional.pad(output, (0, each - output.shape[-1])), mesh)
        return parts.movedim(0, -2).flatten(-2)[..., :num_columns]

    head.register_forward_hook(gather)


def _find_styles(model: PreTrainedModel) -> Mapping[str, str]:
    """Returns the style of each sharded layer except the embedding and the head, which are sharded by vocabulary.

    Raises UserError if the plan is missing or contains a style that this module does not support.
    """
    plan: Mapping[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    patterns = {re.compile(re.escape(key).replace(r"\*", r"[^.]+")): style for key, style in plan.items()}
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    found: dict[str, str] = {}
    inside: dict[str, str] = {}
    for name, module in model.named_modules():
        if not any(module is end for end in ends):
            found.update(_match_style(patterns, name))
        owner, _, last = name.rpartition(".")
        before = "q_proj" if last in HEAD_NORMS else "up_proj" if last == ACTIVATION else None
        is_learned = next(module.parameters(recurse=False), None) is not None
        if before and is_learned and COLUMNS in _match_style(patterns, f"{owner}.{before}").values():
            found.setdefault(name, GRADIENT)
    for name, _ in model.named_parameters():
        inside.update(_match_style(patterns, name))
    _check_styles(model, found, inside)
    return found


def _match_style(patterns: Mapping[re.Pattern[str], str], name: str) -> dict[str, str]:
    styles = [style for pattern, style in patterns.items() if pattern.fullmatch(name)]
    return {name: styles[0]} if styles else {}


def _check_styles(model: PreTrainedModel, found: Mapping[str, str], inside: Mapping[str, str]) -> None:
    name = type(model).__name__
    if not any(style == ROWS for style in found.values()):
        raise UserError(
            f"{name} has no tensor-parallel plan in transformers, so its layers cannot be shared by several ranks. Set "
            "tensor_parallel=1; ranks without it share every model."
        )
    for module, style in found.items():
        if style not in _SHARING:
            raise UserError(
                f"{name}: its plan shares {module} in the style {style!r}, which is not known here. Set "
                "tensor_parallel=1."
            )
    for parameter, style in inside.items():
        owner = parameter.rpartition(".")[0]
        if found.get(owner) != EXPERTS or style not in INSIDE_EXPERTS:
            raise UserError(f"{name}: its plan cuts {parameter} in the style {style!r}: set tensor_parallel=1.")


def _share_by_columns(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a layer by outputs: each rank computes some of them."""
    cut(module, mesh, {"weight": 0, "bias": 0})
    module.register_forward_pre_hook(lambda _, args: (add_gradients(args[0], mesh), *args[1:]))
    compute_with_parts(module, ("weight", "bias"))


def _share_by_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a layer by inputs: each rank computes a summand of the outputs. The bias is added once, to the sum."""
    cut(module, mesh, {"weight": 1})
    compute_with_parts(module, ("weight",))

    def hide_bias(module: nn.Module, args: tuple[Any, ...]) -> None:
        del args
        vars(module)["bias"] = None

    def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        del args
        vars(module).pop("bias", None)
        total = add_up(output, mesh)
        bias = getattr(module, "bias", None)
        return total if bias is None else total + bias

    module.register_forward_pre_hook(hide_bias)
    module.register_forward_hook(add)


def _share_lookup(module: nn.Module, mesh: DeviceMesh, num_rows: int) -> None:
    """Shards the embedding by rows: each rank looks up the tokens of its rows; the results are summed over ranks."""
    first = _first_row(num_rows, mesh)
    size = _first_row(num_rows, mesh, after=1) - first
    padding = cast("int | None", module.padding_idx)  # The gradient of its row is zero.
    vars(module)["padding_idx"] = padding - first if padding is not None and 0 <= padding - first < size else None

    def to_own(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        own = args[0] - first
        is_mine = (own >= 0) & (own < size)
        vars(module)["_is_mine"] = is_mine
        return own.where(is_mine, 0), *args[1:]

    def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        del args
        is_mine = vars(module).pop("_is_mine")
        return add_up(output * is_mine[..., None], mesh)

    cut(module, mesh, {"weight": 0})
    compute_with_parts(module, ("weight",))
    module.register_forward_pre_hook(to_own)
    module.register_forward_hook(add)


def _share_gradient(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keeps a whole parameter that each rank applies to different heads: its gradient is the sum over ranks."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    _replace_while_computing(module, {name: lambda tensor: add_gradients(tensor, mesh) for name in names})


def _share_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the experts: each rank computes some of them for all tokens, and the results are summed over ranks."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    cut(module, mesh, dict.fromkeys(names, 0))
    compute_with_parts(module, names)
    num_experts = _num_experts(module)
    first, size = _first_row(num_experts, mesh), num_experts // mesh.size()
    vars(module)["_is_expert_parallel"] = True  # transformers then ignores indices after the last expert

    def to_own(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows, chosen, weights = expert_inputs(args, kwargs)
        own = chosen - first
        vars(module)["num_experts"] = size
        # Another rank's expert gets the index after the last one, which adds nothing.
        own = own.where((own >= 0) & (own < size), size)
        return (add_gradients(rows, mesh), own, add_gradients(weights, mesh)), {}

    def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        del args
        vars(module)["num_experts"] = num_experts
        return add_up(output, mesh)

    module.register_forward_pre_hook(to_own, with_kwargs=True)
    module.register_forward_hook(add)


_SHARING: Mapping[str, Callable[[nn.Module, DeviceMesh], None]] = {
    COLUMNS: _share_by_columns,
    ROWS: _share_by_rows,
    GRADIENT: _share_gradient,
    EXPERTS: _share_experts,
}


def expert_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the inputs of a module of experts: rows, [rows, k] the experts of each row, and their weights."""
    rows, chosen, weights = (*args, *(kwargs[name] for name in EXPERT_INPUTS[len(args) :]))
    return rows, chosen, weights


def cut(module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int]) -> None:
    """Replaces parameters by DTensors, each sharded along one dimension as torch.chunk does."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    for name, dim in dims.items():
        held = getattr(module, name, None)
        if held is None or isinstance(held, DTensor):
            continue
        # Every rank has the same tensor: no data need to be sent.
        cut = distribute_tensor(held.detach(), mesh, [Shard(dim)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut, requires_grad=held.requires_grad))


def compute_with_parts(module: nn.Module, names: tuple[str, ...] | list[str]) -> None:
    """Makes the module see this rank's part of each parameter as a plain tensor during its forward pass."""
    _replace_while_computing(module, dict.fromkeys(names, _part_with_gradient))


def _part_with_gradient(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=tensor.placements)


def _replace_while_computing(module: nn.Module, replacements: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
    """Puts replacements of parameters into the instance's `__dict__`, which attribute lookup reads first."""

    def replace(module: nn.Module, args: tuple[Any, ...]) -> None:
        del args
        for name, made_of in replacements.items():
            held = module._parameters.get(name)
            if held is not None:
                vars(module)[name] = made_of(held)

    def put_back(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        del args, output
        for name in replacements:
            vars(module).pop(name, None)

    module.register_forward_pre_hook(replace)
    module.register_forward_hook(put_back, always_call=True)


def _first_row(num_rows: int, mesh: DeviceMesh, after: int = 0) -> int:
    """Returns the first row of this rank, or of the rank `after` places later, distributed as torch.chunk does."""
    size = -(-num_rows // mesh.size())
    return min((mesh.get_local_rank() + after) * size, num_rows)


def _read_weight(module: nn.Module) -> Tensor:
    return cast("Tensor", module.weight)


def _num_experts(module: nn.Module) -> int:
    return cast("int", module.num_experts)
