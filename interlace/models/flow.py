"""Flow matching as a chain of random steps from noise to a chunk of actions, each with a density.

A policy gives a velocity for noisy actions at a time. In this module time 1 is noise and time 0 the action, the
straight path is x_t = t noise + (1 - t) action, and its velocity is noise - action (SmolVLA, pi0). `network_time` and
`velocity_sign` convert a network of the opposite convention (GR00T: time 0 is noise, velocity is action - noise).

A deterministic sampler has no density. Two samplers add noise to each step, so that every number of the chain has a
normal distribution:

- `sde` (Flow-SDE of pi_RL, arXiv 2510.25889): noise that keeps the marginal distributions of the flow, to first order.
- `noise` (ReinFlow, arXiv 2505.22094): the deterministic step, and a standard deviation that the policy gives.

Imports no torch: the same arithmetic serves numpy's arrays and torch's tensors.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from interlace.core.types import FloatArray
from interlace.models.config import FlowConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

Numbers = TypeVar("Numbers", NDArray[np.float64], "Tensor")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowSchedule:
    """Chain of one chunk. N = steps, K = actions, P = numbers of an action in the chain, of which A are real."""

    config: FlowConfig
    chunk: int
    """K."""
    size: int
    """A."""

    @property
    def padded_size(self) -> int:
        """Returns P: the real numbers of an action, then padding that the policy sees and the log-prob leaves out."""
        return max(self.config.padded_size, self.size)

    @property
    def num_states(self) -> int:
        """Returns N + 1: the noise that a chain begins with, and the result of each step."""
        return self.config.steps + 1

    @property
    def state_size(self) -> int:
        """Returns K P, the numbers of one state of the chain."""
        return self.chunk * self.padded_size

    @property
    def num_tokens(self) -> int:
        """Returns the numbers of a chain, (N + 1) K P."""
        return self.num_states * self.state_size

    @property
    def velocity_sign(self) -> float:
        """Returns the factor from a network's velocity to noise - action."""
        return 1.0 if self.config.noise_at == 1 else -1.0

    def time(self, step: int) -> float:
        """Returns the time of the state before a step, 1 for the first; `step` N gives 0."""
        return 1.0 - step / self.config.steps

    def network_time(self, step: int) -> float:
        """Returns the time of a step in the network's convention."""
        return self.time(step) if self.config.noise_at == 1 else 1.0 - self.time(step)

    def transition(self, step: int, x: Numbers, velocity: Numbers) -> tuple[Numbers, float]:
        """Returns mean and standard deviation of the state after a step.

        x: state before it. velocity: noise - action. The deviation of sampler `noise` is the policy's: this returns the
        middle of its bounds.
        """
        time, after = self.time(step), self.time(step + 1)
        length = time - after
        if self.config.sampler == "noise":
            return x - velocity * length, (self.config.min_std + self.config.max_std) / 2
        variance = self._variance(step)
        action, noise = x - velocity * time, x + velocity * (1 - time)
        mean = action * (1 - after) + noise * (after - variance * length / (2 * time))
        return mean, float(np.sqrt(length * variance))

    def deterministic(self, step: int, x: Numbers, velocity: Numbers) -> Numbers:
        """Returns the state after a step without noise (Euler)."""
        return x - velocity * (self.time(step) - self.time(step + 1))

    def demonstrate(self, actions: FloatArray, draw: np.random.Generator) -> FloatArray:
        """Draws a chain that leads to shown actions, [K, A] between -1 and 1. Returns [N + 1, K, P].

        The steps are the sampler's with the velocity of the straight path to the actions. So the likelihood of such a
        chain is the flow-matching loss (arXiv 2210.02747), at the times that the sampler visits.
        """
        wanted = np.zeros((self.chunk, self.padded_size), np.float64)
        wanted[:, : self.size] = actions
        states = [draw.normal(size=wanted.shape)]
        for step in range(self.config.steps):
            mean, std = self.transition(step, states[-1], (states[-1] - wanted) / self.time(step))
            states.append(mean + std * draw.normal(size=wanted.shape))
        return np.stack(states).astype(np.float32)

    def _variance(self, step: int) -> float:
        """Returns the variance of Flow-SDE's noise per unit of time; the first step takes the second's time below."""
        time = self.time(step)
        below = 1 - (time if step else self.time(1))
        return self.config.noise_level**2 * time / below


def read_schedule(config: "PretrainedConfig") -> FlowSchedule:
    """Reads the chain of a model whose head is `flow`."""
    return FlowSchedule(config=FlowConfig.parse(config.flow or {}), chunk=config.chunk, size=config.action_size)
