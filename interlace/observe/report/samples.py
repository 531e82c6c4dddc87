"""Samples that a page shows: best, worst, random, longest, one prompt over time, and answers before and after."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.observe.progress import printable
from interlace.observe.report.sample_lanes import format_versions
from interlace.observe.run_data import AnswerPair, EvaluationAnswer, RunData, Transcript, pair_answers

NUM_EACH = 3
NUM_OVER_TIME = 5
NUM_ANSWERS = 6
NUM_REASONS = 12
SEED = 0
"""Seed of the random samples: the page of a run always shows the same ones."""
SHOWN_LETTERS = 4000
"""Letters shown of a prompt or response; samples/ has the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownSample:
    """A sample as text."""

    key: str
    """The same for each page of the run: it keeps an opened sample open on a live page."""
    head: str
    prompt: str
    response: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownSamples:
    """Samples under one heading."""

    title: str
    note: str
    samples: Sequence[ShownSample]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCause:
    """Samples of a terminal event with one reason."""

    event: str
    reason: str
    count: int
    first_step: int
    last_step: int


def sample_groups(run: RunData) -> list[ShownSamples]:
    """Chooses the samples of a run; groups without samples are left out."""
    samples = [sample for sample in run.transcripts if sample.num_tokens]
    scored = [sample for sample in samples if sample.reward is not None]
    best = sorted(scored, key=lambda sample: (-(sample.reward or 0.0), -sample.step))
    worst = sorted(scored, key=lambda sample: (sample.reward or 0.0, -sample.step))
    drawn = random.Random(SEED).sample(samples, min(NUM_EACH, len(samples)))
    longest = sorted(samples, key=lambda sample: -sample.num_tokens)
    has_spread = bool(best) and best[0].reward != best[-1].reward
    groups = (
        ("Best", "highest reward, the latest first", _select_distinct(best) if has_spread else []),
        ("Worst", "lowest reward, the latest first", _select_distinct(worst) if has_spread else []),
        ("Random", "drawn from all steps", sorted(drawn, key=lambda sample: sample.step)),
        ("Longest", "a step waits for them", _select_distinct(longest)),
        ("One prompt over time", "the prompt that was drawn in the most steps", _over_time(scored)),
    )
    return [
        ShownSamples(
            title=title, note=note, samples=[_make_shown_sample(sample, title, at) for at, sample in enumerate(chosen)]
        )
        for title, note, chosen in groups
        if chosen
    ]


def _select_distinct(samples: Sequence[Transcript]) -> list[Transcript]:
    """Returns the first samples, one for each prompt."""
    found: dict[str, Transcript] = {}
    for sample in samples:
        if len(found) == NUM_EACH:
            break
        found.setdefault(sample.uid, sample)
    return list(found.values())


def _over_time(scored: Sequence[Transcript]) -> list[Transcript]:
    """Returns a sample for each of up to NUM_OVER_TIME steps of one prompt; empty if no prompt was drawn twice."""
    by_prompt: dict[str, dict[int, Transcript]] = {}
    for sample in scored:
        by_prompt.setdefault(sample.uid, {}).setdefault(sample.step, sample)
    most = max(by_prompt.values(), key=len, default={})
    return [most[step] for step in _spread_steps(sorted(most))]


def _spread_steps(steps: Sequence[int]) -> list[int]:
    """Returns up to NUM_OVER_TIME steps, the first and the last among them; empty for fewer than two."""
    if len(steps) < 2:
        return []
    count = min(NUM_OVER_TIME, len(steps))
    places = {round(at * (len(steps) - 1) / (count - 1)) for at in range(count)}
    return [steps[place] for place in sorted(places)]


def _make_shown_sample(sample: Transcript, title: str, place: int) -> ShownSample:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    first, last = sample.version_min, sample.version_max
    versions = "" if first is None or last is None else f", {format_versions(first, last)}"
    head = f"Step {sample.step}: {reward}, {sample.num_tokens} tokens, {sample.event}{versions}: {sample.uid}"
    return ShownSample(
        key=f"{title}/{place}", head=printable(head), prompt=cut(sample.prompt), response=cut(sample.response)
    )


def cut(text: str) -> str:
    """Returns text with control characters spelled out, cut to SHOWN_LETTERS."""
    more = f"\n... {len(text) - SHOWN_LETTERS} more letters in samples/" if len(text) > SHOWN_LETTERS else ""
    return printable(text[:SHOWN_LETTERS], keep="\n\t") + more


def failure_causes(run: RunData) -> list[FailureCause]:
    """Counts the samples that were not trained on, by terminal event and reason; the most frequent first."""
    steps: dict[tuple[str, str], list[int]] = {}
    for sample in run.transcripts:
        if sample.event not in ("trained", ""):
            steps.setdefault((sample.event, sample.reason), []).append(sample.step)
    counts = Counter({key: len(found) for key, found in steps.items()})
    return [
        FailureCause(
            event=event,
            reason=printable(reason[:300]) or "-",
            count=count,
            first_step=min(steps[event, reason]),
            last_step=max(steps[event, reason]),
        )
        for (event, reason), count in counts.most_common(NUM_REASONS)
    ]


def answer_pairs(answers: Mapping[int, Sequence[EvaluationAnswer]]) -> list[AnswerPair]:
    """Pairs the answers of the first and the last evaluation; empty with fewer than two evaluations."""
    if len(answers) < 2:
        return []
    pairs = pair_answers(answers[min(answers)], answers[max(answers)])
    return [(_cut_answer(before), _cut_answer(after)) for before, after in pairs[:NUM_ANSWERS]]


def answers_over_time(answers: Mapping[int, Sequence[EvaluationAnswer]]) -> list[ShownSamples]:
    """Returns the answers to one held-out prompt at several evaluations; empty with fewer than three evaluations.

    Takes the first prompt whose answer changes from wrong to right, or else the first one.
    """
    if len(answers) < 3:
        return []
    pairs = pair_answers(answers[min(answers)], answers[max(answers)])
    improved = [after.uid for before, after in pairs if after.correct and not before.correct]
    chosen = next(iter([*improved, *(after.uid for _, after in pairs)]), None)
    found = {step: each for step, shown in answers.items() for each in shown if each.uid == chosen}
    samples = [
        ShownSample(
            key=f"held-out/{step}",
            head=printable(f"Step {step}: {'right' if found[step].correct else 'wrong'}: {chosen}"),
            prompt=cut(found[step].prompt),
            response=cut(found[step].response),
        )
        for step in _spread_steps(sorted(found))
    ]
    note = "its answer at several evaluations"
    return [ShownSamples(title="One held-out prompt over time", note=note, samples=samples)] if samples else []


def _cut_answer(answer: EvaluationAnswer) -> EvaluationAnswer:
    texts = {name: cut(getattr(answer, name)) for name in ("prompt", "right_answer", "response")}
    return answer.model_copy(update={"uid": printable(answer.uid), **texts})
