"""One policy proposes pairs of numbers, the other judges which is larger; both are trained against each other.

python examples/proposer_judge.py all all          # both on all devices: they take turns
python examples/proposer_judge.py 0-50% 50-100%    # separate devices: they overlap
"""

import asyncio
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from interlace.run.clusters.base import run_flow
from interlace.runtime.channel import Channel
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import Worker, WorkerContext, operation

GAPS, STEPS, BATCH = np.array([0.8, 0.4, 0.2, 0.1, 0.05]), 300, (128, 1)


class Policy(Worker):
    """Chooses an action for each state, and learns by REINFORCE: rewards above the mean make the action more likely."""

    def __init__(self, context: WorkerContext, num_inputs: int, num_actions: int) -> None:
        super().__init__(context)
        self.net = nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, num_actions)).double()
        self.optimizer, self.noise = torch.optim.Adam(self.net.parameters(), lr=1e-2), torch.Generator().manual_seed(0)

    @operation(bin="inference")
    def act(self, states: np.ndarray) -> np.ndarray:
        chances = self.net(torch.tensor(states)).detach().softmax(-1) + 0.02  # every action keeps some probability
        return torch.multinomial(chances, 1, generator=self.noise)[:, 0].numpy()

    @operation(bin="train")
    def learn(self, states: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> None:
        logprobs = self.net(torch.tensor(states)).log_softmax(-1)[range(len(actions)), actions]
        self.optimizer.zero_grad()
        (-logprobs * torch.tensor(rewards - rewards.mean())).mean().backward()
        self.optimizer.step()


@dataclass(frozen=True)
class Round:
    """Row of the channel: the chosen gaps for a batch of pairs, the pairs, and the judgements."""

    choices: np.ndarray
    pairs: np.ndarray
    judged: np.ndarray | None = None


async def flow(cluster: Cluster, places: list[str]) -> None:
    """Runs the rounds through the channel. The flow does not depend on the placement."""
    torch.manual_seed(0)
    proposer = await cluster.start("proposer", Policy, 1, len(GAPS), on=places[0])
    judge = await cluster.start("judge", Policy, 2, 2, on=places[1])
    channel = Channel[int, Round]("rounds", Round, cluster.waits, max_rows=1)  # the next round is proposed meanwhile

    async def propose():
        rng = np.random.default_rng(0)
        for step in range(STEPS):
            choices = await proposer.act(numbers := rng.uniform(-1, 1, BATCH))
            yield step, Round(choices, np.hstack([numbers, numbers + rng.choice([-1, 1], BATCH) * GAPS[choices, None]]))

    cluster.spawn(channel.feed(propose(), ["choices", "pairs"]), name="proposer")
    cluster.spawn(channel.fill("judged", ["pairs"], lambda row: judge.act(row.pairs)), name="judge")
    async for step, row in channel.subscribe("trainer", ["judged"]).rows():
        right = (row.judged == row.pairs.argmax(1)).astype(float)
        # The judge is rewarded for right answers, the proposer for gaps at which half of the answers are right.
        pay = 1 - abs(2 * np.array([right[row.choices == choice].mean() for choice in row.choices]) - 1)
        learning = proposer.learn(row.pairs[:, :1], row.choices, pay), judge.learn(row.pairs, row.judged, right)
        await asyncio.gather(*learning)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: {right.mean():.2f} right at a mean gap of {GAPS[row.choices].mean():.2f}")


if __name__ == "__main__":
    asyncio.run(run_flow(lambda cluster: flow(cluster, sys.argv[1:]), devices="cpu:2"))
