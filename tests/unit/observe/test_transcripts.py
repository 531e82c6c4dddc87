"""A transcript contains prompts, answers and their scores."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from interlace.core.runs import Runs
from interlace.core.types import Prompt, Sample, SampleKey, Segment, TerminalEvent
from interlace.observe.jsonl import write_transcripts


@dataclass(frozen=True, kw_only=True)
class Ended:
    sample: Sample
    event: TerminalEvent
    reason: str = ""


def ended(gid: int, index: int, event: TerminalEvent, versions: tuple[int, ...], reward: float | None = None) -> Ended:
    prompt = Prompt(uid=f"sort/{gid}", token_ids=np.arange(3, dtype=np.int32), text="3 1 2", answer="1 2 3")
    sample = Sample(
        key=SampleKey(gid, index),
        prompt=prompt,
        segments=(Segment(token_ids=np.arange(len(versions), dtype=np.int32), versions=Runs.of(versions)),),
        text="1 2 3 ✓",
        reward=reward,
    )
    return Ended(sample=sample, event=event, reason="timed out" if event is TerminalEvent.FAILED else "")


def test_one_object_a_sample_in_order_of_admission(tmp_path: Path) -> None:
    rows = [
        ended(1, 0, TerminalEvent.FAILED, ()),
        ended(0, 1, TerminalEvent.TRAINED, (3, 3, 4), reward=5.0),
        ended(0, 0, TerminalEvent.STALE, (2,), reward=-5.0),
    ]
    path = write_transcripts(tmp_path, 12, rows)
    assert path.name == "step_000012.jsonl"
    read = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["uid"], row["index"], row["event"]) for row in read] == [
        ("sort/0", 0, "stale"),
        ("sort/0", 1, "trained"),
        ("sort/1", 0, "failed"),
    ]
    assert read[1] == {
        "step": 12,
        "group": 0,
        "uid": "sort/0",
        "index": 1,
        "prompt": "3 1 2",
        "response": "1 2 3 ✓",
        "token_ids": [0, 1, 2],
        "num_tokens": 3,
        "reward": 5.0,
        "version_min": 3,
        "version_max": 4,
        "event": "trained",
    }
    assert read[2]["reason"] == "timed out"
    assert (read[2]["reward"], read[2]["version_min"], read[2]["num_tokens"]) == (None, None, 0)


def test_a_conversation_shows_its_segments(tmp_path: Path) -> None:
    whole = ended(0, 0, TerminalEvent.TRAINED, (3, 3))
    tool = Segment(parent=0, token_ids=np.array([7], np.int32), sampled=np.zeros(1, np.bool_), kind="tool")
    whole = replace(whole, sample=replace(whole.sample, segments=(*whole.sample.segments, tool)))
    (row,) = map(json.loads, write_transcripts(tmp_path, 1, [whole]).read_text().splitlines())
    assert row["token_ids"] == [0, 1, 7] and row["num_tokens"] == 3
    assert row["segments"] == [
        {"parent": -1, "kind": "response", "num_tokens": 2},
        {"parent": 0, "kind": "tool", "num_tokens": 1},
    ]


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    write_transcripts(tmp_path, 1, [ended(0, index, TerminalEvent.TRAINED, (0,)) for index in range(4)])
    path = write_transcripts(tmp_path, 1, [ended(0, 0, TerminalEvent.TRAINED, (0,))])
    assert len(path.read_text().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [path]
