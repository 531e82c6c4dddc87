"""What the adapters of serving engines share: the book-keeping of live requests, and the plain verbs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.types import Completion, FinishReason, Metrics, Request
from interlace.engines.rollout.protocol import EngineMemory, EngineReport


@dataclass(slots=True, eq=False)
class _Progress:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class LiveRequests:
    """Requests a serving engine works on, and the tokens it has sent back."""

    def __init__(self) -> None:
        self._live: dict[str, _Progress] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def named(self, ids: Sequence[str] | None) -> list[str]:
        """Those of these ids that are live, each once; None: all, in order of submission."""
        return list(self._live) if ids is None else [name for name in dict.fromkeys(ids) if name in self._live]

    def add(self, request: Request) -> None:
        """Raises UserError for an empty prompt and for raw log-probs, ValueError where the id is live."""
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already live")
        if not request.prompt_ids:
            raise UserError(f"request {request.id}: the prompt is empty. Give it at least one token (a BOS will do).")
        if request.params.raw_logprobs:
            raise UserError(f"request {request.id}: raw_logprobs come from the native engine alone. Leave them off.")
        self._live[request.id] = _Progress(
            request,
            list(request.generated_ids),
            list(request.generated_logprobs),
            list(request.generated_versions),
        )

    def num_sent(self, name: str) -> int:
        """Tokens that came back since the request was submitted."""
        progress = self._live[name]
        return len(progress.token_ids) - len(progress.request.generated_ids)

    def extend(self, name: str, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Tokens came back."""
        progress = self._live[name]
        progress.token_ids += token_ids
        progress.logprobs += logprobs
        progress.versions += [version] * len(token_ids)

    def end(self, name: str, reason: FinishReason) -> Completion:
        """Takes a request out."""
        progress = self._live.pop(name)
        return Completion(
            request=progress.request,
            token_ids=tuple(progress.token_ids),
            logprobs=tuple(progress.logprobs),
            versions=tuple(progress.versions),
            finish_reason=reason,
        )


class ExternalEngine:
    """An adapter's part of the rollout protocol that is the same whichever engine serves."""

    name: str
    """As a report calls it."""
    reason: str
    """Why samples depend on what shares their batch."""

    def __init__(self, seed: int) -> None:
        self._live, self._seed, self._version = LiveRequests(), seed, 0
        self._paused = False

    @property
    def version(self) -> int:
        return self._version

    def memory(self) -> EngineMemory:
        return EngineMemory()

    def metrics(self) -> Metrics:
        return {"num_running": float(len(self._live))}

    def report(self) -> EngineReport:
        notes = ("an update is not atomic", "bytes are not reported")
        return EngineReport(invariant=False, reason=self.reason, attention=self.name, notes=notes)


def request_seed(seed: int, request: Request) -> int:
    """A serving engine's seed is per request, not per position: a resumed request needs one of its own."""
    return stable_hash(seed, request.noise_key, len(request.generated_ids)) % 2**31


def finish_reason(name: str) -> FinishReason:
    """Of a serving engine's 'stop', 'length' or 'abort'."""
    return {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(name, FinishReason.ABORTED)
