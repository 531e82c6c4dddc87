"""AdamW with gradient clipping and a learning-rate schedule over optimizer steps."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from interlace.engines.train.config import OptimizerConfig
from interlace.engines.train.ranks import whole_tensor
from interlace.models.residence import Move

LARGEST_CHANGE = 256.0
"""Largest factor by which one update may change the weights, in root mean squares. Beyond it, the old weights are
smaller than the rounding error of the sum in bfloat16, whose significand has 8 bits."""
SMALLEST_WEIGHT = 1e-3
"""Lower bound of the weights' root mean square in this comparison, since the weights of a new layer may all be 0."""

UNDECAYED = re.compile(r"bias$|norm\.weight$|norm_\w*\.weight$")
"""Names of biases and norms, which may have two dimensions, such as one row for each expert or head."""

OptimizerState: TypeAlias = dict[str, "Tensor"]
"""State in a checkpoint in addition to the weights: AdamW's tensors under `exp_avg.PARAMETER` and so on, by the names
of the model's parameters, so that any number of ranks finds its part; and the counts STEPS and FAILED."""
STEPS, FAILED = "num_steps", "num_failed"
"""Names of the number of optimizer steps, and of the failed updates since the last step."""


class Optimizer:
    """Applies gradients that are accumulated as sums."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        self.step_count = 0
        self.num_failed = 0
        """Failed updates since the last step. The engine counts them."""
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        trained = [*self._named.values()]
        matrices = [each for name, each in self._named.items() if each.ndim >= 2 and not UNDECAYED.search(name)]
        decayed = set(map(id, matrices))
        vectors = [parameter for parameter in trained if id(parameter) not in decayed]
        groups = [
            {"params": alike, "weight_decay": decay}
            for parameters, decay in ((matrices, config.weight_decay), (vectors, 0.0))
            for alike in by_layout(parameters)
        ]
        self.parameters = matrices + vectors
        self._gradients_away: dict[nn.Parameter, Tensor] = {}
        """Gradients that were moved to another device than their parameters."""
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the parameters that are trained."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def next_lr(self) -> float:
        return self.config.lr_at(self.step_count)

    def grad_norm(self, denominator: float) -> Tensor:
        """Computes the L2 norm of the accumulated gradient divided by `denominator`."""
        return total_norm(self._list_gradients()) / denominator

    def explodes(self) -> bool:
        """Returns True if the next update would change the weights by more than LARGEST_CHANGE times their size.

        AdamW moves a weight by about the learning rate for any gradient, so the learning rate and the decay decide.
        """
        change, decay = self.next_lr, self.next_lr * self.config.weight_decay
        if change <= LARGEST_CHANGE * SMALLEST_WEIGHT / 2 and decay <= LARGEST_CHANGE / 2:
            return False  # safe for any weights, so their norm is not computed
        root = math.sqrt(sum(parameter.numel() for parameter in self.parameters))
        norm = float(total_norm([each.detach() for each in self.parameters]))
        return change * root + decay * norm > LARGEST_CHANGE * max(norm, SMALLEST_WEIGHT * root)

    def step(self, denominator: float, norm: float) -> None:
        """Takes one update by (accumulated gradient / denominator), clipped. norm: L2 norm of the divided gradient."""
        bound = self.config.max_grad_norm
        clip = 1.0 if bound is None else min(1.0, bound / (norm + 1e-6))
        if clip != denominator:
            for gradients in by_layout(self._list_gradients()):
                torch._foreach_mul_(gradients, clip / denominator)
        for group in self._adamw.param_groups:
            group["lr"] = self.next_lr
        self._adamw.step()
        self.step_count += 1

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> OptimizerState:
        """Returns live tensors: copy them before the next step if they are written in the background."""
        state = {
            f"{kind}.{name}": tensor
            for name, parameter in self._named.items()
            for kind, tensor in self._adamw.state[parameter].items()
        }
        return {**state, STEPS: torch.tensor(self.step_count), FAILED: torch.tensor(self.num_failed)}

    def empty_state(self, names: Iterable[str]) -> OptimizerState:
        """Makes empty tensors for a saved state, sharded over the ranks like this optimizer's state."""
        state: OptimizerState = {STEPS: torch.tensor(0)}
        for name in names:
            kind, _, parameter = name.partition(".")
            if not parameter:  # a count
                state[name] = torch.tensor(0)
                continue
            # AdamW counts the steps of each parameter in a separate number.
            like = self._named[parameter]
            state[f"{kind}.{parameter}"] = (
                torch.zeros((), device=like.device) if kind == "step" else torch.zeros_like(like.detach())
            )
        return state

    def load_state_dict(self, state: OptimizerState) -> None:
        """Takes ownership of the tensors."""
        self._adamw.state.clear()
        self.num_failed = 0  # a checkpoint of an earlier version has no such count
        for key, tensor in state.items():
            kind, _, name = key.partition(".")
            if key == STEPS:
                self.step_count = int(tensor)
            elif key == FAILED:
                self.num_failed = int(tensor)
            else:
                self._adamw.state[self._named[name]][kind] = tensor

    def relocate(self, move: Move) -> None:
        """Replaces the optimizer's tensors by copies; parameters and gradients belong to the model."""
        for state in self._adamw.state.values():
            state.update({kind: move(tensor) for kind, tensor in state.items()})

    def move_gradients(self, move: Move) -> None:
        """Replaces the gradients by copies; a gradient on another device than its parameter is kept here."""
        held = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        for parameter, gradient in {**held, **self._gradients_away}.items():
            moved = move(gradient)
            is_back = moved.device == parameter.device
            parameter.grad = moved if is_back else None
            if is_back:
                self._gradients_away.pop(parameter, None)
            else:
                self._gradients_away[parameter] = moved

    def tensors(self) -> Iterable[Tensor]:
        """Returns the optimizer's own tensors (moments)."""
        for state in self._adamw.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _list_gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Computes the L2 norm of all tensors together; for sharded tensors, over all ranks."""
    norms = [whole_tensor(torch.nn.utils.get_total_norm(alike)) for alike in by_layout(tensors)]
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def by_layout(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups the tensors by their layout over ranks, since one operation takes tensors of one mesh only."""
    from torch.distributed.tensor import DTensor

    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        found.setdefault(key, []).append(tensor)
    return list(found.values())
