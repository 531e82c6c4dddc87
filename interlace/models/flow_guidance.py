"""Inpainting of known actions into a flow-matching chunk, for real-time chunking (Black et al., arXiv 2506.07339).

Each step's velocity is corrected, so that the chunk that it leads to approaches the known actions Y with weights W:

    v' = v - f * ((Y - A) * W) dA/dx,    A = x - t v,    f = min(largest, t / u * (u^2 + t^2) / t^2),    u = 1 - t

Time t is 1 for noise and 0 for the action, and v is noise - action, as in interlace/models/flow.py. f is also at most
the number of steps, so that a step does not move beyond the known actions.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from interlace.core.guide import Guide
from interlace.models.flow import FlowSchedule


def guidance_factor(schedule: FlowSchedule, step: int, largest: float) -> float:
    """Returns the factor f of a step."""
    time = schedule.time(step)
    most, done = min(largest, schedule.config.steps), 1 - time
    return most if done <= 0 else min(most, (done**2 + time**2) / (done * time))


def guide_velocity(
    schedule: FlowSchedule,
    step: int,
    x: Tensor,
    compute_velocity: Callable[[Tensor], Tensor],
    guides: Sequence[Guide | None],
) -> Tensor:
    """Returns the corrected velocities of a step, in the shape of x, which is [B, K P] or [B, K, P].

    compute_velocity: velocity (noise - action) of states like x, with gradient. guides: [B]; a row without a guide is
    not changed.
    """
    numbers, weights = (_stack_rows(guides, name, x) for name in ("numbers", "weights"))
    factors = [guidance_factor(schedule, step, guide.largest) if guide else 0.0 for guide in guides]
    factor = torch.tensor(factors, device=x.device).view(-1, *[1] * (x.dim() - 1))
    with torch.inference_mode(False), torch.enable_grad():
        start = x.clone().detach().requires_grad_()
        velocity = compute_velocity(start)
        action = start - schedule.time(step) * velocity
        [pull] = torch.autograd.grad(action, start, (numbers - action.detach()) * weights)
    return velocity.detach() - factor * pull


def _stack_rows(guides: Sequence[Guide | None], name: str, x: Tensor) -> Tensor:
    """Returns the arrays of all guides in the shape of x, 0 in rows without a guide."""
    rows = np.zeros(tuple(x.shape), np.float32)
    for place, guide in enumerate(guides):
        if guide is not None:
            rows[place] = np.asarray(getattr(guide, name), np.float32).reshape(rows.shape[1:])
    with torch.inference_mode(False):
        return torch.from_numpy(rows).to(x.device)
