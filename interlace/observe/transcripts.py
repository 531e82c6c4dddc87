"""samples/step_*.jsonl: readable prompts and responses, one object per sample that ended in the step."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Protocol

from interlace.core.errors import PayloadLostError
from interlace.core.types import IntArray, Sample, TerminalEvent
from interlace.observe.atomic_file import write_atomic
from interlace.observe.jsonl import Row, read_rows, to_line


class EndedSample(Protocol):
    """A sample, with its terminal event."""

    @property
    def sample(self) -> Sample: ...

    @property
    def event(self) -> TerminalEvent: ...

    @property
    def reason(self) -> str:
        """Reason of a failure; empty if the sample did not fail."""


def write_transcripts(folder: Path, step: int, ended: Iterable[EndedSample]) -> Path:
    """Writes the file of a step, samples in order of admission, and returns its path."""
    path = step_file(folder, step)
    rows = sorted(ended, key=attrgetter("sample.key"))
    write_atomic(path, "".join(to_line(_make_row(step, row)) for row in rows))
    return path


def step_file(folder: Path, step: int) -> Path:
    """Returns the file of a step's samples."""
    return folder / f"step_{step:06d}.jsonl"


def read_transcripts(folder: Path) -> list[Row]:
    """Reads the rows of all steps, in order. Raises UserError if a file is damaged."""
    return [row for path in sorted(folder.glob("*.jsonl")) for row in read_rows(path)]


def _make_row(step: int, ended: EndedSample) -> Mapping[str, object]:
    sample = ended.sample
    response, token_ids = _read_response(sample)
    row = {
        "step": step,
        "group": sample.key.gid,
        "uid": sample.prompt.uid,
        "index": sample.key.index,
        "prompt": sample.prompt.text,
        "response": response,
        "token_ids": token_ids,
        "num_tokens": sample.num_tokens,
        "reward": sample.reward,
        "version_min": min(sample.versions.values, default=None),
        "version_max": max(sample.versions.values, default=None),
        "event": ended.event,
    }
    if len(sample.segments) > 1 and token_ids is not None:
        row["segments"] = [
            {"parent": segment.parent, "kind": segment.kind, "num_tokens": len(segment.token_ids)}
            for segment in sample.segments
        ]
    if sample.counts and sample.counts.tool_s:
        calls = zip(sample.counts.tool_turns, sample.counts.tool_s, strict=True)
        row["tools"] = [{"turn": turn, "seconds": round(seconds, 6)} for turn, seconds in calls]
    if sample.scored is not None and sample.scored.parts != sample.reward_parts:
        row["scored"] = sample.scored.reward  # Reward without the term that compares lengths within the group
    return {**row, "reason": ended.reason} if ended.reason else row


def _read_response(sample: Sample) -> tuple[str | None, IntArray | None]:
    """Returns text and tokens of a sample. None if its content is lost: the row still shows how the sample ended."""
    try:
        return sample.text, sample.token_ids
    except PayloadLostError:
        return None, None
