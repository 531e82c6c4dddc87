"""Further attempts at samples that failed, and the pause of admission while all attempts fail."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from interlace.core.errors import InterlaceError
from interlace.core.recovery import LOST_CONTENT, Breaker, Cause, RecoveryConfig, SampleFailure
from interlace.core.types import Metrics, Sample, SampleKey, renew_attempt
from interlace.observe.notes import Notes
from interlace.rollouts.stream import ADMITTED
from interlace.runtime.channel import is_counted
from interlace.runtime.cluster import Cluster
from interlace.stages.admission import Admission

LAST_PROBE_S = 60.0


class Redraws:
    """Draws failed samples again.

    Consumes: failures of samples, complete groups whose contents are lost, and notes that a sample was scored.
    Produces: samples without results, for the generation stage; pauses of admission.
    Waits for: the next probe, while the breaker is open.
    Released by: a scored sample.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        cluster: Cluster,
        admission: Admission,
        *,
        generate: Callable[[list[Sample]], None],
        give_up: Callable[[SampleKey, SampleFailure], None],
    ) -> None:
        """generate: begins samples. give_up: ends a sample that failed."""
        self._config, self._cluster, self._admission, self._generate = config, cluster, admission, generate
        self._give_up = give_up
        self._breaker = Breaker(config.failures_in_a_row)
        self._num_attempts: dict[SampleKey, int] = {}
        """Further attempts of live samples so far."""
        self._parked: deque[SampleKey] = deque()
        """Samples whose next attempt waits for the end of the pause."""
        self._probing: asyncio.Task[None] | None = None
        self._counts: Counter[Cause] = Counter()
        self.notes = Notes()
        """Notes about pauses, which are shown to users."""

    def take(self, key: SampleKey, failure: SampleFailure) -> bool:
        """Takes a failed sample. Returns whether it is drawn again; otherwise it ends as failed."""
        cause = failure.cause
        if failure.is_loss and is_counted(self._admission.channel, key):
            self.take_group(key.gid)
            return True
        if not cause.is_infrastructure or key not in self._admission.channel:
            return False
        if not failure.is_loss and self._breaker.failed(cause):  # a lost content does not show an outage
            self._pause(cause)
        is_paused = self._breaker.open_for is not None
        num_before = self._num_attempts.get(key, 0)
        if failure.is_final or (num_before >= self._config.redraws and not is_paused):
            return False
        if not is_paused:  # an outage costs a sample none of its attempts
            self._num_attempts[key] = num_before + 1
        self._counts[cause] += 1
        sample = self._admission.channel.record(key)
        again = Sample(key=key, prompt=sample.prompt)
        if not failure.is_loss:
            again = replace(again, prompt=renew_attempt(sample.prompt))
        self._cluster.timeline.drop_tokens(sample.num_sampled)
        self._admission.reopen(again, ADMITTED)
        if is_paused:
            self._parked.append(key)
        else:
            self._generate([again])
        return True

    def take_group(self, gid: int) -> None:
        """Draws the samples of a generated group again whose contents are lost. The group is then computed again."""
        for sample in self._admission.rows.reopen(gid):
            self._cluster.timeline.drop_tokens(sample.num_sampled)
            if not self.take(sample.key, LOST_CONTENT):
                self._give_up(sample.key, LOST_CONTENT)

    def record_score(self) -> None:
        """Takes note that a sample was scored, which ends a pause."""
        if not self._breaker.succeeded():
            return
        if self._probing:
            self._probing.cancel()
            self._probing = None
        self.notes.add("an attempt succeeded: prompts are admitted again")
        while self._release():
            pass
        self._admission.set_paused(False)

    def metrics(self) -> Metrics:
        """Returns the number of further attempts since the last call, by cause. Forgets samples that have ended."""
        is_live = self._admission.channel.__contains__
        self._num_attempts = {key: count for key, count in self._num_attempts.items() if is_live(key)}
        counts, self._counts = self._counts, Counter()
        return {f"redrawn/{cause}": float(count) for cause, count in sorted(counts.items())}

    def _pause(self, cause: Cause) -> None:
        self._admission.set_paused(True)
        self.notes.add(
            f"{self._config.failures_in_a_row} attempts in a row failed (cause: {cause}): no prompt is admitted until "
            "an attempt succeeds"
        )
        self._probing = self._cluster.spawn(self._probe(cause), name="probe")

    async def _probe(self, cause: Cause) -> None:
        since_s, delay_s = self._cluster.clock.now(), self._config.probe_s
        while True:
            with self._cluster.waits.operation(who="admission", what=f"a pause after failures of {cause}"):
                await asyncio.sleep(delay_s)
            now_s = self._cluster.clock.now()
            if not self._may_succeed():
                since_s = now_s  # before the next publication
            if now_s - since_s > self._config.outage_s:
                raise InterlaceError(
                    f"no attempt at a sample has succeeded for {self._config.outage_s:g} s (recovery.outage_s). "
                    f"Cause of the failures: {cause}."
                )
            self._cluster.watchdog.at_rest()  # the wait for the next probe hides a stall
            if not self._release():
                self._admission.admit_probe()
            delay_s = min(2 * delay_s, LAST_PROBE_S)

    def _may_succeed(self) -> bool:
        """Returns whether a live sample has no score yet, or a group may be admitted."""
        rows, channel = self._admission.rows, self._admission.channel
        keys = [key for gid in self._admission.live_gids() for key in rows.find_keys(gid) if key in channel]
        return not self._admission.closed or any(channel.record(key).reward is None for key in keys)

    def _release(self) -> bool:
        """Begins the next attempt that waits. Returns False if none waits."""
        while self._parked:
            key = self._parked.popleft()
            if key in self._admission.channel:
                self._generate([self._admission.channel.record(key)])
                return True
        return False
