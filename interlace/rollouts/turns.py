"""Conversion of engine responses and episode turns to the segments and columns of a sample."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.episode_counts import EpisodeCounts
from interlace.core.runs import Runs
from interlace.core.trajectory import branches, count_common
from interlace.core.types import (
    FINAL,
    NO_VERSIONS,
    PROMPT,
    BoolArray,
    IntArray,
    Prompt,
    Response,
    RewardResult,
    Sample,
    SampleKey,
    Segment,
)
from interlace.rollouts.base import FinalContext, Outcome, ToolUse, Turn
from interlace.rollouts.stream import Columns
from interlace.rollouts.turn_record import read_reward

CONTEXT = "context"
"""Kind of a segment that an episode inserted."""


def make_answered_sample(key: SampleKey, prompt: Prompt, response: Response) -> Sample:
    """Makes a sample of a response from outside the flow, so that it can be scored."""
    return Sample(
        key=key,
        prompt=prompt,
        segments=(response.segment,),
        finish_reason=response.finish_reason,
        text=response.text,
    )


def turn_columns(
    prompt: Prompt, turns: Sequence[Turn], outcome: Outcome, rewards: Mapping[int, float], tools: Sequence[ToolUse]
) -> Columns:
    """Returns the columns of a sample that an episode generated. Raises ValueError if it has no turn, if its rewards
    have no finite sum, or if an array of the outcome does not fit its turn.

    rewards: rewards of turns, by number. If there are any, the sample's reward is their sum plus the outcome's reward,
    or plus the recipe's if the outcome has none.
    """
    if not turns:
        raise ValueError("the episode ended without a turn, so there is nothing to score or to train on")
    last = turns[-1]
    valid = {number: np.asarray(array) for number, array in outcome.valid.items()}
    shown = {number: np.asarray(array) for number, array in outcome.shown.items()}
    _check_arrays("valid", valid, "b", turns)
    _check_arrays("shown", shown, "iu", turns)
    segments = segments_of(prompt, turns, rewards, valid, shown)
    segments = with_final(segments, prompt, outcome.final)
    columns: Columns = {
        "segments": segments,
        "finish_reason": outcome.finish_reason or last.finish_reason,
        "text": last.text if outcome.text is None else outcome.text,
        "counts": _count_episode(turns, segments, tools),
    }
    if outcome.reward is not None or rewards:
        total = (outcome.reward or 0.0) + math.fsum(rewards.values())
        total = read_reward(total, "the sum of the episode's rewards")
        columns["outcome"] = RewardResult(reward=total, parts=outcome.parts, is_partial=outcome.reward is None)
    return columns


def _check_arrays(name: str, arrays: Mapping[int, NDArray[Any]], kinds: str, turns: Sequence[Turn]) -> None:
    """Raises ValueError unless each array has a value for each token of its turn. kinds: kinds of its numpy type."""
    sizes = {turn.number: len(turn.token_ids) for turn in turns}
    for number, array in arrays.items():
        if number not in sizes:
            raise ValueError(f"Outcome.{name} has an array for turn {number}; the turns are {[*sizes]}")
        if array.shape != (sizes[number],) or array.dtype.kind not in kinds:
            raise ValueError(
                f"Outcome.{name} has an array of type {array.dtype} and shape {array.shape} for turn {number}, which "
                f"has {sizes[number]} tokens: give one {'bool' if kinds == 'b' else 'token id'} for each"
            )


def _count_episode(turns: Sequence[Turn], segments: Sequence[Segment], tools: Sequence[ToolUse]) -> EpisodeCounts:
    contexts = [np.concatenate([turn.prompt_ids, turn.token_ids]) for turn in turns]
    pairs = list(zip(contexts, turns[1:], strict=False))
    return EpisodeCounts(
        num_turns=len(turns),
        num_branches=len(branches(segments)),
        history_tokens=sum(len(before) for before, _ in pairs),
        reused_tokens=sum(count_common(before, turn.prompt_ids) for before, turn in pairs),
        tool_calls=Counter(use.name for use in tools),
        tool_errors=Counter(use.name for use in tools if use.failed),
        tool_s=tuple(use.seconds for use in tools),
        tool_turns=tuple(use.turn for use in tools),
    )


def segments_of(
    prompt: Prompt,
    turns: Sequence[Turn],
    rewards: Mapping[int, float] | None = None,
    valid: Mapping[int, BoolArray] | None = None,
    shown: Mapping[int, IntArray] | None = None,
) -> tuple[Segment, ...]:
    """Builds the tree of turns: each turn continues the earlier turn with whose context and tokens it begins.

    Further context tokens of a turn become a segment that was not sampled. A turn that continues no other continues the
    prompt if its context begins with the prompt, else it begins a new context. A turn with arrays never continues
    another turn, because equal tokens may have different arrays. valid, shown: see Outcome.
    """
    segments: list[Segment] = []
    first = {PROMPT: prompt.token_ids}
    ends: dict[int, IntArray] = {**first}
    """All tokens of each context, by the index of the segment that ends it."""
    for turn in turns:
        parent = _find_continued(ends if turn.inputs is None else first, turn.prompt_ids)
        put_in = turn.prompt_ids if parent is None else turn.prompt_ids[len(ends[parent]) :]
        if len(put_in):
            before = segments[parent].versions if parent is not None and parent != PROMPT else turn.versions
            segments.append(replace(_context_segment(put_in, parent, before), inputs=turn.inputs))
            parent = len(segments) - 1
        segments.append(
            Segment(
                parent=parent,
                token_ids=turn.token_ids,
                sampled=_unless_all((valid or {}).get(turn.number)),
                logprobs=turn.logprobs,
                versions=turn.versions,
                reward=(rewards or {}).get(turn.number),
                query_ids=turn.query_ids,
                shown_ids=(shown or {}).get(turn.number),
            )
        )
        if turn.inputs is None and turn.query_ids is None:
            ends[len(segments) - 1] = np.concatenate([turn.prompt_ids, turn.token_ids])
    return tuple(segments)


def with_final(segments: tuple[Segment, ...], prompt: Prompt, final: FinalContext | None) -> tuple[Segment, ...]:
    """Adds the final context of a truncated episode, then an untrained token at which the critic bootstraps."""
    if final is None:
        return segments
    given = np.asarray(final.token_ids, np.int32)
    parent = _find_continued({PROMPT: prompt.token_ids}, given)
    put_in = given if parent is None else given[len(prompt.token_ids) :]
    versions = segments[-1].versions
    context = replace(_context_segment(put_in, parent, versions), inputs=final.inputs)
    query_ids = np.asarray(final.query_ids, np.int32) if len(final.query_ids) else None
    end = replace(_context_segment(np.zeros(1, np.int32), len(segments), versions), kind=FINAL, query_ids=query_ids)
    return (*segments, context, end)


def _unless_all(valid: BoolArray | None) -> BoolArray | None:
    return None if valid is None or valid.all() else valid


def _find_continued(ends: Mapping[int, IntArray], context: IntArray) -> int | None:
    """Returns the index of the longest context with which this one begins, or None."""
    found = [place for place, ids in ends.items() if np.array_equal(context[: len(ids)], ids)]
    return max(found, key=lambda place: len(ends[place]), default=None)


def _context_segment(token_ids: IntArray, parent: int | None, before: Runs[int]) -> Segment:
    """Makes the segment of inserted tokens. before: versions of the previous turn, or of the first turn."""
    size = len(token_ids)
    return Segment(
        parent=parent,
        token_ids=token_ids,
        sampled=np.zeros(size, np.bool_),
        logprobs=np.zeros(size, np.float32),
        versions=Runs.repeated(before.values[-1], size) if before else NO_VERSIONS,
        kind=CONTEXT,
    )
