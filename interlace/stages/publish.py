"""Publication of new weights as a version, at which the gate returns slots."""

import numpy as np

from interlace.core.types import NO_GROUP, Prompt, Sample, SampleKey, Segment
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.role_groups import ActorGroup
from interlace.runtime.timeline import Timeline
from interlace.schedule.schedule import Schedule
from interlace.schedule.staleness import Gate
from interlace.weights.ref import WeightProbe, WeightRef


class Publisher:
    """Publishes the actor's weights to the rollout engines.

    Consumes: trained steps (`publish`). Each `sync_every` steps make one version.
    Produces: versions. Each returns slots of the gate, updates the engines and renews the budgets of suspended samples.
    Waits for: the weights of all actor ranks. If the schedule blocks and updates all engines at once, also their swaps.
    Released by: the actor's export, and the engines, which swap weights independently of the flow.
    """

    def __init__(self, actor: ActorGroup, pool: EnginePool, gate: Gate, schedule: Schedule, timeline: Timeline) -> None:
        self._actor, self._pool, self._gate, self._timeline = actor, pool, gate, timeline
        timeline.version = gate.version
        self._sync_every = schedule.sync_every
        self._checksum = ""
        self.is_unchanged = False
        """True if the newest version is bitwise equal to the previous one. After an update with a gradient this is a
        fault, such as an adapter that the published weights do not contain."""
        self._waits_for_swap = schedule.waits_for_swap

    async def install(self) -> None:
        """Sends the actor's weights to all engines as the gate's current version."""
        self._pool.update_weights(await self._write_weights(self._gate.version))
        await self._pool.swapped(self._gate.version)

    async def publish(self, step: int) -> bool:
        """Publishes after a trained step. Returns True if a new version was made."""
        self.is_unchanged = False
        if (step + 1) % self._sync_every:
            return False
        ref = await self._write_weights(self._gate.version + 1)
        # From here on the new version is current for the gate and for staleness.
        self._timeline.version = self._gate.publish()
        self._pool.update_weights(ref)
        if self._waits_for_swap:
            await self._pool.swapped(ref.version)
        self._pool.resume()
        return True

    async def _write_weights(self, version: int) -> WeightRef:
        # Without a copy, training would change weights that an engine still reads: an engine that swaps later than the
        # trainer continues, or one that joins or returns between two publications.
        membership = self._pool.membership
        actor = self._actor.with_cause("publication")
        copy = not self._waits_for_swap or membership.keeps_published
        parts = await actor.export_weights(version, copy=copy)
        probe = await self._probe() if membership.rules.probe_ids else None
        ref = WeightRef(version=version, parts=tuple(parts), probe=probe)
        before, self._checksum = self._checksum, ref.checksum
        self.is_unchanged = bool(before) and ref.checksum == before
        return ref

    async def _probe(self) -> WeightProbe:
        """Computes the trainer's log-probs of the fixed probe text under the published weights."""
        token_ids = np.asarray(self._pool.membership.rules.probe_ids, np.int32)
        prompt = Prompt(uid="probe", token_ids=token_ids[:1], text="", answer="")
        sample = Sample(key=SampleKey(NO_GROUP, 0), prompt=prompt, segments=(Segment(token_ids=token_ids[1:]),))
        [logprobs] = await self._actor.with_cause("publication").logprobs([sample])
        return WeightProbe(token_ids=token_ids.tolist(), logprobs=logprobs.tolist())
