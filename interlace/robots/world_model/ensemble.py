"""World model of state vectors: a small ensemble of networks.

From a state vector and a chunk of actions, each member predicts the change of the state, the reward and whether the
task is then solved. Disagreement between members indicates sparse data, and limits the length of imagined episodes.
Shapes: as in model.py; M = members.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.models.config import EnsembleConfig
from interlace.models.inputs import STATE
from interlace.robots.world_model.model import MAX_STARTS, Prediction, Transitions, WorldModel, WorldModelConfig
from interlace.rollouts.envs.spec import Array, ArraySpec


class EnsembleModelConfig(EnsembleConfig, WorldModelConfig):
    """Sizes of an ensemble."""

    state_size: int = Field(ge=1)
    """Size of a state vector, D."""


class EnsembleModel(WorldModel):
    """The ensemble. A state of the model is the state vector. The data of the first fit scales states and chunks."""

    array = STATE
    config: EnsembleModelConfig
    mean: Tensor
    """[D + C] mean of states and chunks."""
    scale: Tensor
    """[D + C] standard deviation of states and chunks."""

    def __init__(self, config: EnsembleModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        given, outputs = config.state_size + config.chunk * config.action_size, config.state_size + 2
        sizes = [(given, config.width), (config.width, config.width), (config.width, outputs)]
        noise = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(config.members, *size, generator=noise) / size[0] ** 0.5) for size in sizes]
        )
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(config.members, 1, size[1])) for size in sizes])
        self.register_buffer("mean", torch.zeros(given))
        self.register_buffer("scale", torch.ones(given))
        self.register_buffer("change_scale", torch.ones(config.state_size))
        self.register_buffer("is_fitted", torch.zeros(()))

    @property
    def observation_spec(self) -> dict[str, ArraySpec]:
        """Spec of `state`."""
        return {self.array: ArraySpec(shape=(self.config.state_size,), dtype="float32")}

    def forward(self, given_BG: Tensor) -> Tensor:
        """Returns [M, B, D + 2]: scaled change of the state, reward, logit of success. given: states, then chunks."""
        x = ((given_BG - self.mean) / self.scale).expand(self.config.members, *given_BG.shape[-2:])
        for weight, bias in zip(self.weights, self.biases, strict=True):
            is_last = weight is self.weights[-1]
            x = torch.baddbmm(bias, x, weight)
            x = x if is_last else F.silu(x)
        return x

    def fit(  # house: the parameters of the interface, and two more
        self, data: Transitions, *, steps: int, seed: int = 0, batch_size: int = 256, lr: float = 1e-3
    ) -> float:
        """Trains all members, each on separate draws. Returns the mean loss of the last tenth of the steps."""
        if not len(data):
            raise UserError("a world model was given no transitions to learn from: collect episodes first")
        states = np.asarray(data.states, np.float32)
        given = torch.from_numpy(np.concatenate([states, data.chunks], axis=1))
        change = torch.from_numpy(np.asarray(data.next_states, np.float32) - states)
        rest = torch.from_numpy(np.stack([data.has_next, data.rewards, data.successes], axis=1))
        if not self.is_fitted:
            self._measure(given, change[rest[:, 0] > 0])
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=1e-4)
        noise, device = torch.Generator().manual_seed(seed), self.mean.device
        given, change, rest = given.to(device), change.to(device), rest.to(device)
        members, losses = self.config.members, []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / 50) * max(0.05, 1 - step / steps)
            draw = torch.randint(len(data), (members, batch_size), generator=noise).to(device)
            out = self(given[draw])
            has_next, reward, success = rest[draw].unbind(-1)
            error = ((out[..., :-2] - change[draw] / self.change_scale) ** 2).mean(-1)
            loss = (error * has_next).mean() + F.mse_loss(out[..., -2], reward)
            loss = loss + F.binary_cross_entropy_with_logits(out[..., -1], success)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return float(np.mean(losses[-max(1, steps // 10) :]))

    @torch.no_grad()
    def predict(self, states: FloatArray, chunks: FloatArray) -> Prediction:
        out = self(torch.from_numpy(np.concatenate([states, chunks], axis=1)))
        changes = out[..., :-2]
        mean, successes = changes.mean(0) * self.change_scale, torch.sigmoid(out[..., -1]).mean(0).numpy()
        return Prediction(
            next_states=states + mean.numpy(),
            rewards=out[..., -2].mean(0).numpy(),
            successes=successes,
            ends=np.zeros_like(successes),
            disagreement=changes.std(0).mean(-1).numpy(),
        )

    def list_starts(self, data: Transitions) -> NDArray[np.int64]:
        """Returns the first rows of episodes."""
        return np.flatnonzero(data.firsts > 0)[:MAX_STARTS]

    def infer_states(self, data: Transitions, rows: NDArray[np.int64]) -> FloatArray:
        return np.asarray(data.states[rows], np.float32)

    def decode(self, states: FloatArray) -> Array:
        return states.copy()

    def _measure(self, given: Tensor, change: Tensor) -> None:
        self.mean.copy_(given.mean(0))
        self.scale.copy_(given.std(0, unbiased=False).clamp(min=1e-4))
        if len(change):
            self.change_scale.copy_(change.square().mean(0).sqrt().clamp(min=1e-4))
        self.is_fitted.fill_(1)
