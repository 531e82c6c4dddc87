"""Requests and deltas as JSON, in the format of `interlace serve`'s engine routes."""

from collections.abc import Iterable, Mapping
from typing import Any

from interlace.core.types import JSON, FinishReason, Request, SampleKey, SamplingParams
from interlace.engines.rollout.services.protocol import Delta, ServiceCapacity, ServiceError, VersionRun

ROUTES = "/engine/v1"
"""Path prefix of the engine routes."""


def write_request(request: Request) -> dict[str, JSON]:
    """Returns a request as JSON. It contains the key of the sampling noise, so any server samples the same tokens."""
    return {
        "uid": request.uid,
        "owner": list(request.owner),
        "attempt": request.attempt,
        "session": request.session,
        "turn": request.turn,
        "repeat": request.repeat,
        "prompt_ids": [*request.list_prompt()],
        "params": request.params.model_dump(mode="json", exclude_defaults=True),
        "may_continue": request.may_continue,
        "generated_ids": _read_integers(request.generated_ids),
        "generated_logprobs": [float(logprob) for logprob in request.generated_logprobs],
        "generated_versions": _read_integers(request.generated_versions),
    }


def read_request(given: JSON) -> Request:
    """Reads the output of write_request(). Raises ValueError, KeyError or TypeError if a field is missing or wrong."""
    data: Any = given
    gid, index = data["owner"]
    return Request(
        uid=str(data["uid"]),
        owner=SampleKey(int(gid), int(index)),
        attempt=int(data.get("attempt", 0)),
        session=int(data.get("session", 0)),
        turn=int(data.get("turn", 0)),
        repeat=int(data.get("repeat", 0)),
        prompt_ids=_read_integers(data["prompt_ids"]),
        params=SamplingParams.model_validate(data.get("params", {})),
        may_continue=bool(data.get("may_continue", False)),
        generated_ids=_read_integers(data.get("generated_ids", ())),
        generated_logprobs=[float(logprob) for logprob in data.get("generated_logprobs", ())],
        generated_versions=_read_integers(data.get("generated_versions", ())),
    )


def write_delta(request_id: str, delta: Delta) -> dict[str, JSON]:
    """Returns a delta as JSON."""
    found: dict[str, JSON] = {
        "id": request_id,
        "token_ids": _read_integers(delta.token_ids),
        "logprobs": [float(logprob) for logprob in delta.logprobs],
        "versions": [list(run) for run in delta.versions],
    }
    if delta.finish_reason is not None:
        found |= {"finish_reason": delta.finish_reason.value, "num_cached_tokens": delta.num_cached_tokens}
    if delta.refusal:
        found["refusal"] = delta.refusal
    return found


def read_delta(given: JSON) -> tuple[str, Delta]:
    """Reads the output of write_delta(). Raises ServiceError for anything else."""
    data: Any = given
    try:
        reason = data.get("finish_reason")
        return str(data["id"]), Delta(
            token_ids=data["token_ids"],
            logprobs=data["logprobs"],
            versions=[(int(version), int(count)) for version, count in data["versions"]],
            finish_reason=None if reason is None else FinishReason(str(reason)),
            num_cached_tokens=int(data.get("num_cached_tokens", 0)),
            refusal=str(data.get("refusal", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServiceError(f"the server sent {str(data)[:120]}, which is not a delta of a request: {error}") from None


def write_capacity(capacity: ServiceCapacity) -> dict[str, JSON]:
    """Returns a capacity as JSON."""
    return {name: getattr(capacity, name) for name in ServiceCapacity.__dataclass_fields__}


def read_capacity(data: Mapping[str, JSON]) -> ServiceCapacity:
    """Reads the output of write_capacity(); unknown fields are ignored."""
    known = {name: value for name, value in data.items() if name in ServiceCapacity.__dataclass_fields__}
    return ServiceCapacity(**known)  # type: ignore[arg-type]


def runs_of(versions: Iterable[int]) -> list[VersionRun]:
    """Returns the runs of equal consecutive versions."""
    runs: list[VersionRun] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + 1)
        else:
            runs.append((int(version), 1))
    return runs


def _read_integers(values: Iterable[Any]) -> list[int]:
    return [int(value) for value in values]
