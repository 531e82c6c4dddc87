"""Flow matching as a chain of random steps from noise to a chunk of actions; each step has a density.

A policy outputs a velocity for noisy actions at a given time. In this module time 1 is noise and time 0 the action. The
straight path is x_t = t noise + (1 - t) action, and its velocity is noise - action (SmolVLA, pi0). `network_time` and
`velocity_sign` convert a network of the opposite convention (GR00T: time 0 is noise, velocity is action - noise).

A deterministic sampler has no density. Two samplers add noise to each step, so that every number of the chain has a
normal distribution:

- `sde` (Flow-SDE of pi_RL, arXiv 2510.25889): the noise preserves the marginal distributions of the flow, to first
  order.
- `noise` (ReinFlow, arXiv 2505.22094): the deterministic step, plus noise with a standard deviation that the policy
  outputs.

The module imports no torch: the same arithmetic serves numpy arrays and torch tensors.
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
    """Chain of one chunk. N = steps, K = actions, P = numbers per action in the chain, A = real numbers per action."""

    config: FlowConfig
    chunk: int
    """Actions of the chunk, K."""
    size: int
    """Real numbers per action, A."""

    @property
    def padded_size(self) -> int:
        """Returns P. The padding after the real numbers is visible to the policy but excluded from the log-prob."""
        return max(self.config.padded_size, self.size)

    @property
    def num_states(self) -> int:
        """Returns N + 1: the initial noise and the result of each step."""
        return self.config.steps + 1

    @property
    def state_size(self) -> int:
        """Returns K P, the numbers of one state of the chain."""
        return self.chunk * self.padded_size

    @property
    def num_tokens(self) -> int:
        """Returns the numbers of a whole chain, (N + 1) K P."""
        return self.num_states * self.state_size

    @property
    def velocity_sign(self) -> float:
        """Returns the factor that converts the network's velocity to noise - action."""
        return 1.0 if self.config.noise_at == 1 else -1.0

    def time(self, step: int) -> float:
        """Returns the time of the state before a step: 1 for the first step, 0 for `step` N."""
        return 1.0 - step / self.config.steps

    def network_time(self, step: int) -> float:
        """Returns the time of a step in the network's convention."""
        return self.time(step) if self.config.noise_at == 1 else 1.0 - self.time(step)

    def transition(self, step: int, x: Numbers, velocity: Numbers) -> tuple[Numbers, float]:
        """Returns mean and standard deviation of the state after a step.

        x: state before it. velocity: noise - action. For sampler `noise` the policy outputs the standard deviation;
        this function returns the middle of its bounds.
        """
        time, after = self.time(step), self.time(step + 1)
        length = time - after
        if self.config.sampler == "noise":
            return x - velocity * length, (self.config.min_std + self.config.max_std) / 2
        variance = self._compute_variance(step)
        action, noise = x - velocity * time, x + velocity * (1 - time)
        mean = action * (1 - after) + noise * (after - variance * length / (2 * time))
        return mean, float(np.sqrt(length * variance))

    def deterministic(self, step: int, x: Numbers, velocity: Numbers) -> Numbers:
        """Returns the state after a step without noise (Euler)."""
        return x - velocity * (self.time(step) - self.time(step + 1))

    def demonstrate(self, actions: NDArray[np.floating], draw: np.random.Generator) -> FloatArray:
        """Draws a chain that ends at demonstrated actions, [K, A] between -1 and 1. Returns [N + 1, K, P].

        Each step is the sampler's, with the velocity of the straight path to the actions. The negative log-likelihood
        of such a chain is therefore the flow-matching loss (arXiv 2210.02747) at the sampler's times.
        """
        wanted = np.zeros((self.chunk, self.padded_size), np.float64)
        wanted[:, : self.size] = actions
        states = [draw.normal(size=wanted.shape)]
        for step in range(self.config.steps):
            mean, std = self.transition(step, states[-1], (states[-1] - wanted) / self.time(step))
            states.append(mean + std * draw.normal(size=wanted.shape))
        return np.stack(states).astype(np.float32)

    def _compute_variance(self, step: int) -> float:
        """Returns the variance of Flow-SDE's noise per unit of time. The first step uses the second step's time in the
        denominator.
        """
        time = self.time(step)
        below = 1 - (time if step else self.time(1))
        return self.config.noise_level**2 * time / below


def read_schedule(config: "PretrainedConfig") -> FlowSchedule:
    """Reads the chain of a model whose head is `flow`."""
    return FlowSchedule(config=FlowConfig.parse(config.flow or {}), chunk=config.chunk, size=config.action_size)
