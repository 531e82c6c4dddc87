"""The operations of each role, as flows and stages call them: the worker's own, each giving a Handle of its result.

Which worker a protocol is of, its docstring says; a test holds names, arguments and results of both together.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from interlace.core.row import RowName
from interlace.core.types import FloatArray, Metrics, Progress, Request, Response, RewardResult, Sample, SampleKey
from interlace.robots.envs.pool import EnvBatch
from interlace.robots.envs.process import SlotJob
from interlace.robots.envs.spec import EnvSpec
from interlace.runtime.handle import Handle
from interlace.runtime.typed_group import TypedGroup
from interlace.weights.ref import Place, Route, UpdateMode, WeightPart, WeightRef

if TYPE_CHECKING:
    from interlace.engines.rollout.protocol import EngineReport


class RolloutGroup(TypedGroup, Protocol):
    """An engine: workers/rollout.py, RolloutWorker."""

    def serve(
        self, submissions: Sequence[Request], aborts: Sequence[str], ended: Sequence[SampleKey] = ()
    ) -> Handle[Progress]:
        """Takes requests in and out, then decodes until a sequence finishes or interrupt() comes."""
        ...

    def interrupt(self) -> Handle[None]:
        """Lets a serve() that runs return after its current decode step."""
        ...

    def abort(self) -> Handle[tuple[Response, ...]]:
        """Ends everything and returns what there is, to be resubmitted."""
        ...

    def update_weights(self, ref: WeightRef, mode: UpdateMode) -> Handle[None]:
        """Swaps all weights between two decode steps."""
        ...

    def weight_place(self) -> Handle[Place]:
        """Tells where the engine reads weights."""
        ...

    def stop_token_ids(self) -> Handle[tuple[int, ...]]:
        """Names tokens that end the model's responses."""
        ...

    def engine_metrics(self) -> Handle[Metrics]:
        """Reads the engine's counters since the last call."""
        ...

    def health(self) -> Handle[str]:
        """Returns why the engine is lost; empty if it is not."""
        ...

    def recover(self) -> Handle[str]:
        """Brings a lost engine back. Returns why that failed, or an empty text."""
        ...

    def report(self) -> "Handle[EngineReport]":
        """Tells what the engine found out about the model."""
        ...


class EnvGroup(TypedGroup, Protocol):
    """An instance of simulators: workers/env.py, EnvWorker."""

    def spec(self) -> Handle[EnvSpec]:
        """Waits until the environments are there, and says what they are like."""
        ...

    def simulate(self, jobs: Sequence[SlotJob]) -> Handle[EnvBatch]:
        """Does jobs together, on the devices."""
        ...

    def simulate_beside(self, jobs: Sequence[SlotJob]) -> Handle[EnvBatch]:
        """Does jobs on the host, beside those that are under way."""
        ...

    def forget(self, slot: int) -> Handle[None]:
        """Ends the episode of a slot."""
        ...


class RewardGroup(TypedGroup, Protocol):
    """A scorer: workers/reward.py, RewardWorker or RewardModelWorker."""

    def score(self, samples: Sequence[Sample]) -> Handle[list[RewardResult]]:
        """Gives one result a sample; a failure is a result too."""
        ...


class ReferenceGroup(TypedGroup, Protocol):
    """A model that stays: workers/reference.py, ReferenceWorker."""

    def logprobs(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Gives [L] of each sample."""
        ...

    def attention(self) -> Handle[str]:
        """Says how the rows of a micro-batch are laid out."""
        ...


class TrainedGroup(TypedGroup, Protocol):
    """A model that is trained: workers/trained.py, TrainedWorker."""

    def accumulate(self, samples: Sequence[Sample] | Sequence[RowName], prepared: bool = False) -> Handle[None]:
        """Adds samples to the open minibatch's gradient; those of the earliest prepare(), where `prepared`: by name."""
        ...

    def prepare(self, samples: Sequence[Sample]) -> Handle[None]:
        """Lays samples out for a later accumulate(), while operations go on."""
        ...

    def optimizer_step(self) -> Handle[None]:
        """Closes the minibatch."""
        ...

    def step_metrics(self) -> Handle[Metrics]:
        """Gives metrics of the minibatches since the last call, which ends their step."""
        ...

    def copy_checkpoint(self) -> Handle[None]:
        """Copies what a checkpoint holds to the host."""
        ...

    def write_checkpoint(self, folder: Path) -> Handle[None]:
        """Writes what was copied, while operations go on."""
        ...

    def load_optimizer(self, folder: Path) -> Handle[None]:
        """Restores what was written beside the weights."""
        ...

    def attention(self) -> Handle[str]:
        """Says how the rows of a micro-batch are laid out."""
        ...

    def checkpoint_bytes(self) -> Handle[int]:
        """Says how much will be written, about."""
        ...


class ActorGroup(TrainedGroup, Protocol):
    """The trained policy: workers/actor.py, ActorWorker."""

    def accumulate_replayed(self, samples: Sequence[Sample]) -> Handle[None]:
        """Adds trajectories that are learnt from again, under the loss for these."""
        ...

    def logprobs(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Gives [L] of each sample under the current weights."""
        ...

    def evaluate(self, samples: Sequence[Sample]) -> Handle[Metrics]:
        """Gives the loss and its metrics on samples that are not trained on."""
        ...

    def base_logprobs(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Gives [L] of each sample under the weights below the adapter."""
        ...

    def weight_place(self) -> Handle[list[Place]]:
        """Tells where each rank writes weights."""
        ...

    def open_weights(self, route: Route) -> Handle[None]:
        """Says how weights travel from now on."""
        ...

    def export_weights(self, version: int, *, copy: bool) -> Handle[list[WeightPart]]:
        """Makes a version ready to be fetched, each rank its part. copy: whether later updates leave it alone."""
        ...


class CriticGroup(TrainedGroup, Protocol):
    """The model that judges each token: workers/critic.py or workers/process_reward.py, each with one of the two."""

    def values(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Gives [L] of each sample: the return expected before each token. Of CriticWorker."""
        ...

    def process_rewards(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Gives [L] of each sample, which has reference log-probs. Of ProcessRewardWorker."""
        ...
