"""Training on given rows: the loop of SFT, DPO and reward models.

          rows           batches
    stream ----> batches -------> reference > actor > end of step

No policy generates and no weights are published, so nothing waits for anything but the step before.
"""

from interlace.flows.offline_run import OfflineRun


async def offline_training(run: OfflineRun) -> None:
    """Trains until the run's last step."""
    async for batch in run.batches(run.rows):  # in the order of the seed
        await run.compare(batch)  # log-probs of the reference, if the loss compares with it
        await run.actor.update(batch)
        await run.end_step(batch)  # metrics, and the observer: logs, evaluation, checkpoint
