"""Output layer of a flow-matching policy: conditions of a chunk, and the velocity network of its chain."""

import math

import torch
from torch import Tensor, nn

from interlace.models.flow import FlowSchedule
from interlace.models.number_ids import ids_to_numbers

FREQUENCIES = (1.0, 2.0, 4.0, 8.0)
"""Frequencies of the time features, in half turns between time 0 and 1."""


class FlowOutputs(nn.Linear):
    """Output layer from hidden states of query tokens to the numbers of a chain.

    The first K queries of a chunk produce its conditions. `expert` computes the velocity from conditions, a state of
    the chain and a time.
    """

    def __init__(self, hidden: int, schedule: FlowSchedule) -> None:
        super().__init__(hidden, schedule.config.condition_size, bias=False)
        self.schedule = schedule
        self.learns_std = schedule.config.sampler == "noise"
        size, width = schedule.state_size, schedule.config.expert_width
        inputs = schedule.chunk * schedule.config.condition_size + size + 1 + 2 * len(FREQUENCIES)
        outputs = size * (2 if self.learns_std else 1)
        self.expert = nn.Sequential(
            nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, outputs)
        )

    def forward(self, hidden: Tensor, answers: Tensor | None = None) -> Tensor:
        """Computes the conditions of each query, [..., C]; with answers, the distributions of the answers.

        hidden: [..., H]. answers: [T] ids of whole chains; `hidden` is then [1, T, H], their queries. Returns mean and
        log standard deviation of each answer, [1, T, 2].
        """
        conditions = super().forward(hidden)
        if answers is None:
            return conditions
        schedule = self.schedule
        if (
            len(answers) < schedule.num_tokens
        ):  # A rank without samples runs one token, so that all ranks reduce gradients.
            return conditions + 0 * sum([parameter.sum() for parameter in self.expert.parameters()])
        with torch.autocast(hidden.device.type, enabled=False):
            chain = ids_to_numbers(answers).view(-1, schedule.num_states, schedule.state_size)
            of_chunk = self.conditions(conditions.flatten(0, -2))
            found = [torch.zeros(*chain[:, 0].shape, 2, device=chain.device)]
            for step in range(schedule.config.steps):
                _, mean, log_std = self.step(of_chunk, chain[:, step], step)
                found.append(torch.stack([mean, log_std], -1))
            return torch.stack(found, 1).reshape(1, -1, 2)

    def conditions(self, outputs: Tensor) -> Tensor:
        """Selects the conditions of each chunk, [B, K C], from the outputs of all queries, [B tokens, C]."""
        of_queries = outputs.float().view(-1, self.schedule.num_tokens, outputs.shape[-1])
        return of_queries[:, : self.schedule.chunk].flatten(1)

    def step(self, conditions: Tensor, state: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns velocity (noise - action), mean and log standard deviation of the next state, [B, K P] each.

        conditions: [B, K C]. state: [B, K P] before the step.
        """
        schedule = self.schedule
        time = torch.full((len(state), 1), schedule.network_time(step), device=state.device)
        turns = time * math.pi * torch.tensor(FREQUENCIES, device=state.device)
        features = torch.cat([conditions, state, time, turns.sin(), turns.cos()], 1)
        found = self.expert(features.to(self.expert[0].get_parameter("weight").dtype)).float()
        velocity = found[:, : schedule.state_size] * schedule.velocity_sign
        mean, std = schedule.transition(step, state, velocity)
        if not self.learns_std:
            return velocity, mean, torch.full_like(mean, math.log(std))
        low, high = schedule.config.min_std, schedule.config.max_std
        own = low + (high - low) * found[:, schedule.state_size :].sigmoid()
        return velocity, mean, own.log()
