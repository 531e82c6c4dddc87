"""The planner: searches schedules for a workload, scored by what is handed in, within limits that the user sets.

Analytic bounds and memory prune candidates before any is simulated; a beam search at coarse fidelity finds what to
look at, and successive halving spends more simulated steps on fewer of them. Pure: no clock, no threads; effort is
counted in simulated samples, so the same arguments give the same plan.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from interlace.core.errors import UserError
from interlace.core.profile import Profile
from interlace.schedule.bounds import Misfit, Workload, least_step_s, misfit
from interlace.schedule.candidates import Candidate, by_kind, lag_steps, neighbours, plain
from interlace.schedule.placement import Device
from interlace.schedule.plans import (
    Accepts,
    Fidelity,
    PlanLimits,
    Planned,
    Refused,
    Score,
    Scorer,
    SearchResult,
    WhyNot,
    pareto,
)
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule

BASELINE = "verl-colocated"
CURRENT = "current"
"""Name of the plan that a run follows now."""
SURE, LAST = 2, 6
"""Best plans that are looked at on the whole cluster in any case, and at most."""
FRONT = 5
"""Plans that are looked at closely for being less stale or less biased than faster ones."""
BEAM = 3
"""Candidates whose neighbours are tried in a round of the search."""
SMALLEST = 32
"""Devices of the smallest model of a cluster that is simulated in its place."""
ROUNDS_WITHOUT_GAIN = 2
ALIKE = 0.005
"""Share of speed by which plans of the same length bias differ where they are taken for the same."""


def search(
    profile: Profile,
    workload: Workload,
    devices: tuple[Device, ...],
    limits: PlanLimits,
    score: Scorer,
    *,
    effort: int,
    accepts: Accepts = lambda _schedule: None,
    current: Schedule | None = None,
) -> SearchResult:
    """Finds schedules. effort: simulated samples, about. current: looked at closely beside the best.

    Raises UserError where nothing fits or limits contradict each other.
    """
    found = _Search(profile, workload, devices, limits, score, accepts, effort)
    return found.run(Candidate.of(current, CURRENT, devices) if current else None)


class _Search:
    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        devices: tuple[Device, ...],
        limits: PlanLimits,
        score: Scorer,
        accepts: Accepts,
        effort: int,
    ) -> None:
        self._profile, self._workload, self._devices, self._limits = profile, workload, devices, limits
        self._score, self._accepts = score, accepts
        self._scales = coarser(workload)
        samples = workload.samples_per_step
        # Half of the effort goes into the search, a sixth into the middle and the rest into the end.
        self._coarse = Fidelity(scale=self._scales[0], steps=4 if samples >= 512 else 6)
        self._middle = Fidelity(scale=self._scales[1], steps=6)
        self._fine = Fidelity(scale=1, steps=5 if samples >= 2048 else 12)
        self._left = effort
        self._seen: dict[Candidate, Score | Refused] = {}
        self._schedules: dict[Candidate, Schedule] = {}
        self._simulated: dict[tuple[Schedule, Fidelity], Score | Refused] = {}
        """Scores by what was simulated: several candidates may come to the same schedule."""
        self._misfits: list[Misfit] = []
        self._reasons: list[str] = []
        self._num_pruned = self._num_scored = 0
        self._effort = effort

    def run(self, current: Candidate | None) -> SearchResult:
        """Searches coarsely, then halves."""
        presets = {name: Candidate.of(load_schedule(name), name) for name in preset_names()}
        mixed = [each for start in (*plain(), *presets.values()) for each in by_kind(start, self._workload.pools)]
        self._try([*presets.values(), *self._respanned([*plain(), *mixed])])
        self._climb()
        chosen = self._promising()
        if not chosen:
            self._refuse()
        middle = self._scored(chosen, self._middle)
        inside = [candidate for candidate in _ranked(middle) if self._is_inside(candidate, middle[candidate])]
        front = pareto([self._plan(each, found) for each in inside if isinstance(found := middle[each], Score)])
        # What is compared comes first, then the front and the next best, as far as the effort goes.
        asked = [*inside[:SURE], *([current] if current else []), presets[BASELINE], *_unbiased(inside, middle)[:1]]
        asked += self._affordable([*(plan.candidate for plan in front[:FRONT]), *inside[SURE:LAST]], asked)
        fine = self._scored(asked, self._fine)
        plans = {each: self._plan(each, found) for each, found in fine.items() if isinstance(found, Score)}
        ranked = [plans[each] for each in _ranked(fine) if self._is_inside(each, fine[each])]
        seen = {each: score for each, score in middle.items() if each not in fine and self._is_inside(each, score)}
        ranked += [self._plan(each, score) for each in _ranked(seen) if isinstance(score := seen[each], Score)]
        if not ranked:
            self._refuse()
        return SearchResult(
            ranked=ranked,
            baseline=plans.get(presets[BASELINE]),
            current=plans.get(current) if current else None,
            front=pareto(ranked),
            why_not=self._why_not(presets, ranked[0]),
            num_scored=self._num_scored,
            num_pruned=self._num_pruned,
        )

    def _affordable(self, candidates: Iterable[Candidate], asked: Sequence[Candidate]) -> list[Candidate]:
        """Returns those of the candidates, in their order, that the effort left behind `asked` allows looking at."""
        left = self._left - sum(self._cost(each, self._fine) for each in asked)
        found = []
        for each in dict.fromkeys(candidates):
            left -= 0 if each in asked else self._cost(each, self._fine)
            if left < 0:
                break
            found.append(each)
        return found

    def _promising(self) -> list[Candidate]:
        """Returns the fastest candidates, and those of the coarse front that are less stale or less biased."""
        inside = {each: score for each, score in self._seen.items() if self._is_inside(each, score)}
        plans = [self._plan(each, score) for each, score in inside.items() if isinstance(score, Score)]
        fastest, front = _unlike(inside), (plan.candidate for plan in pareto(plans)[:8])
        return list(dict.fromkeys([*fastest[:8], *front, *_unbiased(fastest, inside)[:2]]))

    def _climb(self) -> None:
        """Tries the neighbours of the best until nothing better comes, or half of the effort is used."""
        best, idle, expanded = 0.0, 0, set[Candidate]()
        while idle < ROUNDS_WITHOUT_GAIN and self._left > self._effort / 2:
            beam = [each for each in self._best(4 * BEAM) if each not in expanded][:BEAM]
            if not beam:
                return
            expanded.update(beam)
            has_reference = "reference" in self._workload.roles
            around = [
                replace(near, name=each.name or "planned")
                for each in beam
                for near in neighbours(
                    each, spans=self._workload.spans, has_reference=has_reference, pools=self._workload.pools
                )
            ]
            self._try(around)
            found = self._best(1)
            now = self._rate(found[0]) if found else 0.0
            idle, best = (0, now) if now > best * 1.005 else (idle + 1, max(now, best))

    def _respanned(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Returns candidates with engines of several devices."""
        return [
            replace(each, layout=replace(each.layout, span=span))
            for each in candidates
            for span in self._workload.spans
        ]

    def _try(self, candidates: Iterable[Candidate]) -> None:
        """Simulates coarsely the candidates that may be better than the best so far; the most promising first."""
        fresh = []
        for each in dict.fromkeys(candidates):
            if each in self._seen:
                continue
            schedule = self._fitting(each)
            if schedule is None or self._limits.refusal(schedule):
                continue
            fresh.append((least_step_s(schedule, self._profile, self._workload, self._devices), each))
        fresh.sort(key=lambda pair: pair[0])
        best = self._best(1)
        top = self._seen[best[0]] if best else None
        # Of a step that trains on all that is generated, whatever the best leaves out.
        limit = top.step_s / (1 + min(0.0, top.length_shift)) if isinstance(top, Score) else math.inf
        # A sixth more than the bound: it is an expectation.
        promising = [each for least_s, each in fresh if least_s <= 1.17 * limit]
        self._num_pruned += len(fresh) - len(promising)
        for start in range(0, len(promising), 16):
            if self._left <= self._effort / 2:
                return
            self._seen.update(self._scored(promising[start : start + 16], self._coarse))

    def _scored(self, candidates: Iterable[Candidate], fidelity: Fidelity) -> dict[Candidate, Score | Refused]:
        chosen = [each for each in dict.fromkeys(candidates) if self._fitting(each)]
        count, pools = self._workload.on_model(fidelity.scale)
        scaled = [(each, each.on(count, pools)) for each in chosen]
        ready = {each: (schedule, fidelity) for each, schedule in scaled if schedule}
        fresh = {task: each for each, task in ready.items() if task not in self._simulated}
        found = self._score([*fresh])
        self._left -= sum(self._cost(each, fidelity) for each in fresh.values())
        self._num_scored += len(fresh)
        self._reasons += [each.reason for each in found if isinstance(each, Refused)]
        self._simulated.update(zip(fresh, found, strict=True))
        return {each: self._simulated[task] for each, task in ready.items()}

    def _cost(self, candidate: Candidate, fidelity: Fidelity) -> int:
        """Returns the samples that are simulated."""
        steps = fidelity.num_steps(candidate.rest)
        return steps * self._workload.samples_per_step // fidelity.scale

    def _fitting(self, candidate: Candidate) -> Schedule | None:
        """Returns the candidate's schedule where it fits the cluster, its memory and whatever else is asked."""
        if candidate in self._schedules:
            return self._schedules[candidate]
        schedule = candidate.on(len(self._devices), self._workload.pools)
        if schedule is None:
            return None
        too_large = misfit(schedule, self._profile, self._workload, self._devices)
        reason = None if too_large else self._accepts(schedule)
        if too_large:
            self._misfits.append(too_large)
        if reason:
            self._reasons.append(reason)
        if too_large or reason:
            self._num_pruned += 1
            return None
        self._schedules[candidate] = schedule
        return schedule

    def _is_inside(self, candidate: Candidate, score: Score | Refused) -> bool:
        limits = self._limits
        return (
            isinstance(score, Score)
            and limits.refusal(self._schedules[candidate]) is None
            and -score.length_shift <= limits.max_length_shift
            and score.step_s <= limits.max_step_s
        )

    def _best(self, count: int) -> list[Candidate]:
        inside = {each: score for each, score in self._seen.items() if self._is_inside(each, score)}
        return _unlike(inside)[:count]

    def _rate(self, candidate: Candidate) -> float:
        score = self._seen[candidate]
        return score.tokens_per_s if isinstance(score, Score) else 0.0

    def _plan(self, candidate: Candidate, score: Score) -> Planned:
        schedule = self._schedules[candidate]
        return Planned(
            name=candidate.name, schedule=schedule, score=score, lag_steps=lag_steps(schedule), candidate=candidate
        )

    def _why_not(self, presets: Mapping[str, Candidate], best: Planned) -> list[WhyNot]:
        """Tells of each preset what it loses to the best, both looked at coarsely; of those out of bounds too."""
        told = []
        outside = [each for each in (*presets.values(), best.candidate) if each not in self._seen]
        self._seen.update(self._scored(outside, replace(self._coarse, steps=2)))
        top = self._seen[best.candidate]
        for name, candidate in presets.items():
            if candidate == best.candidate:
                continue
            score = self._seen.get(candidate)
            if not isinstance(score, Score) or not isinstance(top, Score):
                reason = score.reason if isinstance(score, Refused) else "does not fit this cluster"
                told.append(WhyNot(preset=name, ratio=None, reason=reason))
                continue
            ratio = score.tokens_per_s / top.tokens_per_s
            # Device-seconds a trained token, in those that the best plan spends on one.
            more = {bin: share / ratio - top.bins.get(bin, 0.0) for bin, share in score.bins.items()}
            loses = sorted(((bin, by) for bin, by in more.items() if by > 0.02), key=lambda pair: -pair[1])[:3]
            reason = self._limits.refusal(self._schedules[candidate]) or ""
            told.append(WhyNot(preset=name, ratio=ratio, loses=loses, reason=reason))
        return told

    def _refuse(self) -> None:
        """Raises UserError: why there is no plan."""
        if any(self._is_inside(each, score) for each, score in self._seen.items()):
            return
        limits = self._limits
        scores = [score for each, score in self._seen.items() if isinstance(score, Score)]
        if scores:
            fastest = min(score.step_s for score in scores)
            raise UserError(
                f"no schedule holds a step to {limits.max_step_s:.4g} s with a staleness of at most "
                f"{limits.max_lag} and a length shift of at most {limits.max_length_shift:.0%}: the shortest "
                f"step found takes {fastest:.4g} s. Allow more time, more staleness, or give more devices."
            )
        if self._misfits:
            least = min(self._misfits, key=lambda each: each.needed_bytes - each.there_bytes)
            raise UserError(
                f"no plan fits into memory. Of all, the nearest is one in which {least.sentence}. Give more or larger "
                "devices, a smaller model, or fewer tokens a micro-batch."
            )
        first = self._reasons[0] if self._reasons else "no placement fits this number of devices"
        raise UserError(f"no schedule can run this recipe here. The first that was tried: {first}")


def _ranked(scores: Mapping[Candidate, Score | Refused]) -> list[Candidate]:
    rates = {each: score.tokens_per_s for each, score in scores.items() if isinstance(score, Score)}
    return sorted(rates, key=lambda each: -rates[each])


def _unbiased(candidates: Iterable[Candidate], scores: Mapping[Candidate, Score | Refused]) -> list[Candidate]:
    """Returns those of the candidates that train on responses as long as were generated."""
    return [each for each in candidates if isinstance(score := scores[each], Score) and score.is_unbiased]


def _unlike(scores: Mapping[Candidate, Score | Refused]) -> list[Candidate]:
    """Returns the fastest first, one of those that do the same: a change without effect is no step forward."""
    found: list[Candidate] = []
    last: Score | None = None
    for each in _ranked(scores):
        score = scores[each]
        if not isinstance(score, Score):
            continue
        if (
            last is None
            or score.tokens_per_s < (1 - ALIKE) * last.tokens_per_s
            or score.length_shift != last.length_shift
        ):
            found.append(each)
            last = score
    return found


def coarser(workload: Workload) -> tuple[int, int]:
    """Returns the scales of the coarse and the middle fidelity: common divisors of devices and prompts."""
    kinds = [count for _, count in workload.pools] or [workload.num_devices]
    common = math.gcd(workload.prompts_per_step, *kinds)
    fitting = [
        scale
        for scale in range(1, common + 1)
        if common % scale == 0 and workload.num_devices // scale >= min(SMALLEST, workload.num_devices)
    ]
    coarse = fitting[-1]
    return coarse, min((scale for scale in fitting if scale * scale >= coarse), default=1)
