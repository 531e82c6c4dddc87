"""Rollout engine that is a server: the rollout protocol over a client of an engine service."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import InterlaceError
from interlace.core.types import FinishReason, Metrics, Request, Response, SampleKey
from interlace.engines.rollout.external import LiveRequests
from interlace.engines.rollout.named_weights import GivenWeights, NamedWeights
from interlace.engines.rollout.protocol import (
    ENGINE_PARTS,
    EngineMemory,
    EngineReport,
    StepOutput,
    SwitchMode,
    check_mode,
)
from interlace.engines.rollout.request_checks import Limits
from interlace.engines.rollout.services.link import ServerLink
from interlace.engines.rollout.services.protocol import (
    SHARED_MEMORY,
    Delta,
    ServiceError,
    VersionSource,
    can_write_manifest,
)
from interlace.engines.rollout.services.version_folders import VersionFolders, version_folder_of
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Place, UpdateMode, WeightProbe, WeightRef
from interlace.weights.saved import SavedForm, SavedFormWeights, SavedWeights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from interlace.engines.rollout.live_weights import LiveWeights

ABORT_S = 10.0
"""Seconds for the last tokens of aborted requests to arrive; tokens that arrive later are sampled again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model of a server."""

    limits: Limits
    weights: "LiveWeights | None" = None
    """Names and shapes for the check of an update before it is sent; if None, only the server checks it."""
    folder: Path | None = None
    """Folder with the model's configuration."""
    memory: EngineMemory = EngineMemory()
    manifest_transports: Collection[str] = ()
    """Transports of the versions that the server reads by a manifest."""
    manifest_reader: int | None = None
    """Process that reads manifests, 0 for a server at an address; None if the server reads none."""
    tokenizer: "PreTrainedTokenizerBase | None" = None
    """Finds stop strings that began before a request was resumed; None if the server finds them."""
    form: SavedForm | None = None
    """Names and shapes of the weights in the folders that the server reads; None if they are the model's."""


class LinkedServer:
    """Methods of an engine that concern only its server."""

    def __init__(self, link: ServerLink, model: ServedModel, report: EngineReport) -> None:
        """link: connected, and the server is ready. report: with the name of the server as its attention."""
        self._link, self._model = link, model
        self._report = replace(report, attention=f"{report.attention} at {link.name}")
        self._folders = VersionFolders()

    def interrupt(self) -> None:
        self._link.inbox.interrupt()

    def release(self, owners: Sequence[SampleKey]) -> None:
        """Does nothing: a server's prefix cache has its own order of eviction."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-prob of each token after the first of each sequence, at temperature 1.

        Raises ServiceError if the server is lost.
        """
        found = None if self._link.lost else self._link.call(lambda client: client.score(sequences))
        if found is None:
            raise ServiceError(self._link.lost)
        return found

    def health(self) -> str:
        return self._link.lost

    def weight_place(self) -> Place:
        here, reader = Place.here(), self._model.manifest_reader
        return here if reader is None else replace(here, process=reader)

    def memory(self) -> EngineMemory:
        return self._model.memory

    def report(self) -> EngineReport:
        return self._report

    def close(self) -> None:
        self._link.close()
        self._folders.close()

    def _withdraw(self, name: str) -> None:
        """Ends a running request, and ignores its later deltas."""
        self._link.inbox.forget(name)
        self._link.call(lambda client: client.abort([name]))

    def _write_folder(self, weights: "Mapping[str, Tensor]") -> Path:
        """Writes a version into a folder that the server reads."""
        form = self._model.form
        return self._folders.write(dict(SavedFormWeights(weights, form) if form else weights), self._model.folder)


class ServiceEngine(LinkedServer):
    """RolloutEngine over a server. Requests run at the server; step() waits for their deltas."""

    gives_up_parts = False

    def __init__(self, link: ServerLink, model: ServedModel, report: EngineReport) -> None:
        super().__init__(link, model, report)
        self._live = LiveRequests()
        self._unsent: dict[str, Request] = {}
        self._finished: list[Response] = []
        """Requests that ended during an abort of others, for the next step."""
        self.version = 0
        self._source: VersionSource | None = None
        """Source of the version that the server serves."""
        self._read: int | None = None
        """Last version that the server's process has read by a manifest."""
        self._probe: WeightProbe | None = None
        self._paused = self._is_away = False

    def submit(self, request: Request) -> None:
        self._model.limits.check(request)
        self._live.add(request)
        self._unsent[request.id] = request

    def step(self) -> StepOutput:
        new_tokens = 0
        finished, self._finished = self._finished, []
        if not self._paused and not self._is_away:
            self._send_requests()
            if not finished and len(self._live) and not self._link.lost:
                self._link.inbox.wait()
            new_tokens, ended = self._take_deltas()
            finished += ended
        return StepOutput(
            finished=tuple(finished),
            num_running=len(self._live),
            num_new_tokens=new_tokens,
            drawn=self._live.drawn(),
            lost=self._link.lost,
        )

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Response, ...]:
        """Ends requests and returns them; a request that ended in the meantime keeps its finish reason."""
        wanted = self._live.named(ids)
        for name in wanted:
            self._unsent.pop(name, None)
        sent = [name for name in wanted if self._link.inbox.is_running(name)]
        if sent and not self._link.lost:
            self._link.abort(sent, patience_s=ABORT_S)
        chosen, found = set(wanted), list[Response]()
        _, ended = self._take_deltas(aborted=chosen)
        for one in ended:
            # A refused request is not submitted again: the next step reports it.
            (self._finished if one.failure or one.request.id not in chosen else found).append(one)
        for name in wanted:
            if name in self._live:
                self._link.inbox.forget(name)
                found.append(self._live.end(name, FinishReason.ABORTED))
        return tuple(found)

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._link.call(lambda client: client.pause("keep"))

    def resume(self) -> None:
        if self._paused:
            self._link.call(lambda client: client.resume())
            self._paused = False

    def update_weights(
        self,
        tensors: "Mapping[str, Tensor]",
        version: int,
        mode: UpdateMode,
        *,
        frozen: bool = False,  # noqa: ARG002 - a server reads its own copy
    ) -> None:
        check_mode(mode)
        self._check_shapes(GivenWeights(tensors))
        self._replace(self._write_folder(tensors), version, mode)

    def load(self, folder: str | Path, version: int, mode: UpdateMode) -> None:
        check_mode(mode)
        self._check_shapes(SavedWeights(folder))
        self._replace(Path(folder).absolute(), version, mode)

    def pull_weights(self, ref: WeightRef, mode: UpdateMode, reader: WeightReader) -> None:
        self._probe = None
        check_mode(mode)
        # A manifest is of the model's names.
        reads = self._model.form is None and can_write_manifest(ref, self._model.manifest_transports)
        folder = version_folder_of(ref)
        # The server has to read a version by its manifest before it can apply a delta to the version.
        if folder is not None and not (reads and ref.parts[0].is_base):
            self._replace(folder, ref.version, mode, probe=ref.probe)
        elif reads and not can_write_manifest(ref, SHARED_MEMORY):
            self._replace(self._folders.store_tensors(ref, self._read), ref.version, mode, probe=ref.probe)
        else:
            with reader.open(ref) as weights:  # The trainer does not write over shared memory that is open here.
                self._check_shapes(GivenWeights(weights))
                self._replace(ref if reads else self._write_folder(weights), ref.version, mode, probe=ref.probe)

    def recover(self) -> str:
        self._read = None
        try:
            self._link.reconnect()
            # The parts of a manifest may have been overwritten. The newest version is loaded before the engine serves.
            if isinstance(self._source, Path) and self._source.is_dir():
                self._link.load(self._source, self.version, "recompute", self._probe)
            if self._paused:
                self._link.call(lambda client: client.pause("keep"))
        except (InterlaceError, OSError) as error:
            self._link.lose(str(error))
        return self._link.lost

    def onload(self, parts: Sequence[str] = ENGINE_PARTS) -> None:  # noqa: ARG002 - a server wakes as a whole
        if self._is_away:
            self._link.change_sleep(sleeps=False)
            self._is_away = False

    def offload(self, kv: SwitchMode = "offload", parts: Sequence[str] = ENGINE_PARTS) -> None:  # noqa: ARG002
        """Frees the devices: running requests are computed again after onload(), regardless of `kv`."""
        if self._is_away:
            return
        self._resubmit_partials(self.abort())
        self._link.change_sleep(sleeps=True)
        self._is_away = True

    def metrics(self) -> Metrics:
        return {"num_running": float(len(self._live)), "is_lost": float(bool(self._link.lost))}

    def _check_shapes(self, weights: NamedWeights) -> None:
        """Refuses weights of other shapes; if a folder's names are not the model's, only the server checks them."""
        known = self._model.weights
        if known is not None and (not isinstance(weights, SavedWeights) or weights.shapes.keys() <= known.names):
            known.check(weights)

    def _replace(self, source: VersionSource, version: int, mode: UpdateMode, probe: WeightProbe | None = None) -> None:
        """Loads a version. A server that is lost meanwhile keeps its weights, and the next step reports the loss."""
        partials = self.abort() if mode == "recompute" else ()
        try:
            self._link.load(source, version, "keep" if mode == "keep" else "recompute", probe)
        except ServiceError as error:
            self._link.lose(str(error))
        else:
            self.version, self._source, self._probe = version, source, probe
            self._read = version if isinstance(source, WeightRef) else self._read
            self._folders.keep(source if isinstance(source, Path) else None)
        self._resubmit_partials(partials)

    def _resubmit_partials(self, partials: Sequence[Response]) -> None:
        """Submits aborted requests again, with their tokens so far; the next step returns the others."""
        for one in partials:
            if one.finish_reason == FinishReason.ABORTED:
                self.submit(one.resumed)
            else:
                self._finished.append(one)

    def _send_requests(self) -> None:
        if self._unsent and not self._link.lost:
            requests, self._unsent = [*self._unsent.values()], {}
            self._link.send(requests)

    def _take_deltas(self, aborted: Set[str] = frozenset()) -> tuple[int, list[Response]]:
        """Processes the deltas that have arrived. Returns the number of new tokens, and the ended requests.

        aborted: requests that the caller aborted. The others that the server aborts are submitted again, with their
        tokens so far: another client that takes over the server ends the requests of all clients.
        """
        count, ended = 0, list[Response]()
        for name, delta in self._link.inbox.take():
            if name not in self._live:
                continue
            if delta.refusal:
                ended.append(replace(self._live.end(name, FinishReason.ABORTED), failure=delta.refusal))
                continue
            try:
                self._extend_sequence(name, delta)
            except InterlaceError as error:
                self._link.lose(f"it returned an invalid result: {error}")
                break
            count += len(delta.token_ids)
            reason = delta.finish_reason
            if self._live.cut_at_stop(name, len(delta.token_ids), self._model.tokenizer):
                reason = FinishReason.STOP
                if delta.finish_reason is None:
                    self._withdraw(name)
            if reason is None:
                continue
            response = self._live.end(name, reason, delta.num_cached_tokens)
            if response.finish_reason == FinishReason.ABORTED and name not in aborted:
                self.submit(response.resumed)
            else:
                ended.append(response)
        return count, ended

    def _extend_sequence(self, name: str, delta: Delta) -> None:
        start = 0
        for version, length in delta.versions:
            chosen = slice(start, start + length)
            self._live.extend(name, delta.token_ids[chosen], delta.logprobs[chosen], version)
            start += length
        if start != len(delta.token_ids) or start != len(delta.logprobs):
            raise ServiceError(
                f"request {name}: {len(delta.token_ids)} tokens came with {len(delta.logprobs)} log-probs and versions "
                f"of {start}"
            )
        if delta.all_versions:
            self._live.set_versions(name, [version for version, length in delta.all_versions for _ in range(length)])
