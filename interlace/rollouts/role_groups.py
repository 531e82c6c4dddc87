"""Typed worker groups: the operations of each role's workers, as flows and stages call them. Each returns a Handle.

The docstring of each protocol names its worker class. A test compares names, arguments and results of both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from interlace.core.progress import Progress
from interlace.core.row import RowName
from interlace.core.transitions import Learned, TransitionBatch
from interlace.core.types import FloatArray, IntArray, Metrics, Request, Response, RewardResult, Sample, SampleKey
from interlace.rollouts.envs.jobs import EnvBatch, SlotJob
from interlace.rollouts.envs.spec import EnvSpec
from interlace.runtime.handle import Handle
from interlace.runtime.typed_group import TypedGroup
from interlace.weights.ref import Place, Route, UpdateMode, WeightPart, WeightRef

if TYPE_CHECKING:
    from interlace.engines.rollout.protocol import EngineReport


class RolloutGroup(TypedGroup, Protocol):
    """A rollout engine: workers/rollout.py, RolloutWorker."""

    def serve(
        self, requests: Sequence[Request], aborts: Sequence[str], ended: Sequence[SampleKey] = ()
    ) -> Handle[Progress]:
        """Adds and aborts requests, then decodes until a sequence finishes or interrupt() is called."""
        ...

    def interrupt(self) -> Handle[None]:
        """Makes a running serve() return after its current decode step."""
        ...

    def abort(self) -> Handle[tuple[Response, ...]]:
        """Aborts all sequences and returns them as partial responses, to be resubmitted."""
        ...

    def update_weights(self, ref: WeightRef, mode: UpdateMode) -> Handle[None]:
        """Swaps all weights between two decode steps."""
        ...

    def weight_place(self) -> Handle[Place]:
        """Returns the location from which the engine reads weights."""
        ...

    def stop_token_ids(self) -> Handle[tuple[int, ...]]:
        """Returns the tokens that end the model's responses."""
        ...

    def engine_metrics(self) -> Handle[Metrics]:
        """Returns the engine's metrics since the last call."""
        ...

    def health(self) -> Handle[str]:
        """Returns the reason why the engine is lost, or an empty text."""
        ...

    def recover(self) -> Handle[str]:
        """Recovers a lost engine. Returns the reason if this failed, or an empty text."""
        ...

    def report(self) -> "Handle[EngineReport]":
        """Returns the engine's report about the loaded model."""
        ...


class EnvGroup(TypedGroup, Protocol):
    """An instance of simulators: robots/env_worker.py, EnvWorker."""

    def spec(self) -> Handle[EnvSpec]:
        """Waits until the environments have started, and returns their shapes and tasks."""
        ...

    def simulate(self, jobs: Sequence[SlotJob]) -> Handle[EnvBatch]:
        """Runs jobs as one batch on the devices."""
        ...

    def simulate_beside(self, jobs: Sequence[SlotJob]) -> Handle[EnvBatch]:
        """Runs jobs on the host, concurrently with other jobs."""
        ...

    def forget(self, slot: int) -> Handle[None]:
        """Ends the episode of a slot."""
        ...


class RewardGroup(TypedGroup, Protocol):
    """A scorer: workers/reward.py, RewardWorker or RewardModelWorker."""

    def score(self, samples: Sequence[Sample]) -> Handle[list[RewardResult]]:
        """Returns one result per sample. A failure is also a result."""
        ...


class ReferenceGroup(TypedGroup, Protocol):
    """A model that is not trained: workers/reference.py, ReferenceWorker."""

    def logprobs(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Returns the log-probs of each sample, [L]."""
        ...

    def top_logprobs(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Returns [L, 1 + 2 K] of each sample: log-probs, then ids and log-probs of the K most probable tokens."""
        ...

    def attention(self) -> Handle[str]:
        """Returns the layout of the rows of a micro-batch."""
        ...


class TrainedGroup(TypedGroup, Protocol):
    """A model that is trained: workers/trained.py, TrainedWorker."""

    def accumulate(self, samples: Sequence[Sample] | Sequence[RowName], prepared: bool = False) -> Handle[None]:
        """Adds samples to the gradient of the open minibatch. prepared: the samples are names of prepared samples."""
        ...

    def prepare(self, samples: Sequence[Sample]) -> Handle[None]:
        """Lays out samples for a later accumulate(), concurrently with other operations."""
        ...

    def optimizer_step(self) -> Handle[None]:
        """Closes the minibatch and steps the optimizer."""
        ...

    def step_metrics(self) -> Handle[Metrics]:
        """Returns metrics of the minibatches since the last call, and ends their step."""
        ...

    def copy_checkpoint(self) -> Handle[None]:
        """Copies the state that a checkpoint stores to the host."""
        ...

    def write_checkpoint(self, folder: Path) -> Handle[None]:
        """Writes the copied state, concurrently with other operations."""
        ...

    def load_optimizer(self, folder: Path) -> Handle[None]:
        """Restores the optimizer's state from a checkpoint."""
        ...

    def attention(self) -> Handle[str]:
        """Returns the layout of the rows of a micro-batch."""
        ...

    def checkpoint_bytes(self) -> Handle[int]:
        """Returns an estimate of the size of a checkpoint, in bytes."""
        ...


class ActorGroup(TrainedGroup, Protocol):
    """The trained policy: workers/actor.py, ActorWorker."""

    def accumulate_replayed(self, samples: Sequence[Sample]) -> Handle[None]:
        """Adds replayed trajectories to the gradient, under the loss for replay."""
        ...

    def learn(
        self, context_ids: IntArray, batches: Sequence[TransitionBatch], weights: Sequence[FloatArray] = ()
    ) -> Handle[Learned]:
        """Makes one update of an off-policy algorithm for each batch. weights: [B] of each; if empty, all are 1."""
        ...

    def logprobs(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Returns the log-probs of each sample under the current weights, [L]."""
        ...

    def evaluate(self, samples: Sequence[Sample]) -> Handle[Metrics]:
        """Gives the loss and its metrics on samples that are not trained on."""
        ...

    def base_logprobs(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Returns the log-probs of each sample under the base model without the adapter, [L]."""
        ...

    def weight_place(self) -> Handle[list[Place]]:
        """Returns the location to which each rank writes weights."""
        ...

    def open_weights(self, route: Route) -> Handle[None]:
        """Selects the transport of the weights from now on."""
        ...

    def export_weights(self, version: int, *, copy: bool) -> Handle[list[WeightPart]]:
        """Makes a version available to engines, one part per rank. copy: whether later updates leave it unchanged."""
        ...


class CriticGroup(TrainedGroup, Protocol):
    """A trained model that rates each token: workers/critic.py, whose two workers have one method each."""

    def values(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Returns for each sample the return that CriticWorker expects before each token, [L]."""
        ...

    def process_rewards(self, samples: Sequence[Sample]) -> Handle[list[FloatArray]]:
        """Returns the process rewards of each sample by ProcessRewardWorker, [L]. Samples need reference log-probs."""
        ...
