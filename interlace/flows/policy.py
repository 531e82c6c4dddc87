"""Policy optimization: the whole training loop, written once, as the on-policy algorithm.

         prompts           samples                                          groups          batches
    gate -------> rollout ---------> reward > select > reference > critic > advantages ---------> actor, critic
     ^               ^                                                                                 |
     |               +----------------------------- weights ----------------------------- publish <----+
     +-------------------------------------------- slots ----------------------------------+

The lines before `async for` connect the stages to one channel of samples. Then all stages run concurrently. Two things
limit each of them: the gate (how far generation may run ahead of training) and its devices. The schedule sets both, and
with them the mode: synchronous or with stale samples, on shared devices in turns or as a pipeline.

The method that a line calls states what the line consumes and produces, what it waits for, and what releases it:
`PolicyRun` (run.py), the roles (roles.py), `TrainStage` (stages/train.py) for the actor, `ReplayRole` (replay.py).
"""

from asyncio import gather

from interlace.flows.run import PolicyRun


async def policy_optimization(run: PolicyRun) -> None:
    """Trains until the last step of the run, or the end of its data."""
    samples = run.rollout.generate(run.prompts)  # prompts pass the gate; samples leave as they finish
    samples = run.select(run.reward.score(samples))  # a filtered group is replaced
    samples = run.critic.values(run.reference.logprobs(samples))  # no-ops unless the algorithm needs them
    groups = run.advantages(samples)  # a group leaves when its last sample has arrived
    async for batch in run.batches(groups):  # the batch fills while it is trained on
        await gather(run.actor.update(batch), run.critic.update(batch))
        await run.replay.learn(batch)  # a no-op unless the recipe has a replay buffer
        await run.publish(batch)  # may make a new version; then the gate admits more
