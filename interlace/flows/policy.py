"""Policy optimization for language models: the whole loop, written once, as the on-policy algorithm.

         prompts           samples                                          groups          batches
    gate -------> rollout ---------> reward > select > reference > critic > advantages ---------> actor, critic
     ^               ^                                                                                 |
     |               +----------------------------- weights ----------------------------- publish <----+
     +-------------------------------------------- slots ----------------------------------+

Every stage starts at once. Two things hold it back: the gate (how far generation may run ahead of training) and its
devices. Which way of running this is, synchronous or stale, in turns or as a pipeline, is the schedule's business.
"""

from asyncio import gather

from interlace.flows.run import PolicyRun


async def policy_optimization(run: PolicyRun) -> None:
    """Trains until the run's last step, or the end of its data."""
    samples = run.rollout.generate(run.prompts)  # prompts pass the gate; samples leave as they finish
    samples = run.select(run.reward.score(samples))  # a group that is filtered out is replaced
    samples = run.critic.values(run.reference.logprobs(samples))  # what the algorithm does not need passes through
    groups = run.advantages(samples)  # a group leaves when its last sample arrived
    async for batch in run.batches(groups):  # fills while it is trained on
        await gather(run.actor.update(batch), run.critic.update(batch))
        await run.replay.learn(batch)  # where the recipe keeps trajectories to learn from again
        await run.publish(batch)  # maybe a new version: the gate admits more
