"""The planner: searches schedules for a workload, scored by a given function, within limits that the user sets.

Analytic bounds and memory prune candidates before any is simulated. A beam search at coarse fidelity finds promising
candidates, and successive halving spends more simulated steps on fewer of them. The remaining effort determines how
many candidates are simulated, and how closely. Once it is spent, the search returns the best plan so far. The search
has no clock: with a SampleEffort, the same arguments give the same plan.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from interlace.core.errors import UserError
from interlace.forecast.search.bounds import coarser, least_step_s, prefill_cost
from interlace.forecast.search.candidates import Candidate, by_kind, neighbours, plain
from interlace.forecast.search.feasible import FeasibleSchedules, SearchProblem
from interlace.forecast.search.plans import (
    Fidelity,
    Planned,
    Refused,
    SampleEffort,
    Score,
    Scorer,
    SearchResult,
    WhyNot,
    pareto,
    select_tied,
)
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule

BASELINE = "verl-colocated"
CURRENT = "current"
"""Name of the plan that a run uses now."""
SURE, LAST = 2, 6
"""Minimum and maximum number of best plans that are simulated on the whole cluster."""
SEARCH_LEAVES = 0.5
"""Share of the effort that is reserved for a closer prediction of the best plans."""
FRONT = 5
"""Plans of the Pareto front that are simulated closely although faster plans exist."""
BEAM = 3
"""Candidates whose neighbours are tried in one round of the search."""
MANY, FEW_STEPS = 40, 2
"""Coarse simulations that the effort should allow; if it does not, each counts few steps."""
SHORT_TURNS = 8
"""Turns of a robot's episode below the final fidelity."""
ROUNDS_WITHOUT_GAIN = 2
ALIKE = 0.005
"""Relative difference in speed below which plans of equal length shift count as the same."""


def search(
    problem: SearchProblem, score: Scorer, *, effort: SampleEffort, current: Schedule | None = None
) -> SearchResult:
    """Searches for schedules. current: the schedule that a run uses; it is predicted as closely as the best.

    Raises UserError if nothing fits or the limits contradict each other.
    """
    found = _Search(problem, score, effort)
    return found.run(Candidate.of(current, CURRENT, problem.devices) if current else None)


class _Search:
    def __init__(self, problem: SearchProblem, score: Scorer, effort: SampleEffort) -> None:
        self._problem, self._workload = problem, problem.workload
        workload = problem.workload
        self._score = score
        self._scales = coarser(workload)
        requests = workload.requests_per_step
        turns = max(1, round(workload.turns / SHORT_TURNS)) if workload.num_envs else 1
        # The search takes half of the effort, the middle fidelity a fifth, and the final one the rest.
        coarse_steps = 6 if requests < 512 else 4 if requests < 16_384 else 2
        self._coarse = Fidelity(scale=self._scales[0], steps=coarse_steps, turns=turns)
        deep = max(plain(), key=lambda each: self._coarse.num_steps(each.rest))
        if not effort.affords(MANY * self._count_samples(deep, self._coarse)):
            self._coarse = replace(self._coarse, steps=FEW_STEPS)
        self._middle = Fidelity(scale=self._scales[1], steps=6 if requests < 16_384 else 2, turns=turns)
        self._fine = Fidelity(scale=1, steps=12 if requests < 2048 else 5 if requests < 16_384 else 2)
        self._effort = effort
        self._seen: dict[Candidate, Score] = {}
        self._refused: dict[Candidate, str] = {}
        """Reasons why simulations of candidates ended with an error."""
        self._feasible = FeasibleSchedules(problem)
        self._simulated: dict[tuple[Schedule, Fidelity], Score | Refused] = {}
        """Scores by simulated schedule; several candidates may result in the same schedule."""
        self._num_scored = 0

    def run(self, current: Candidate | None) -> SearchResult:
        """Searches at coarse fidelity, then applies successive halving."""
        presets = {name: self._make_seed(Candidate.of(load_schedule(name), name)) for name in preset_names()}
        seeds = [self._make_seed(each) for each in plain()]
        mixed = [each for start in (*seeds, *presets.values()) for each in by_kind(start, self._workload.pools)]
        start = [*([current] if current else []), presets[BASELINE], *presets.values()]
        self._try_candidates([*start, *self._vary_spans([*seeds, *mixed])])
        self._climb_hill()
        chosen = self._select_promising()
        if not chosen:
            self._feasible.refuse(self._seen, self._refused)
        self._refuse_untrained()
        if current in self._seen:
            chosen = list(dict.fromkeys([current, *chosen]))
        closer = self._score_all(self._select_affordable(chosen, self._middle, 0.7), self._middle)
        middle = {each: closer.get(each, self._seen[each]) for each in chosen if each not in self._refused}
        inside = [
            candidate for candidate in _rank_all(middle) if self._feasible.is_inside(candidate, middle[candidate])
        ]
        front = pareto([self._make_plan(each, middle[each]) for each in inside])
        # The plans to compare come first, then the front and the next best, as far as the effort allows.
        asked = [
            *([current] if current else []),
            *inside[:SURE],
            presets[BASELINE],
            *_select_unbiased(inside, middle)[:1],
        ]
        asked += [*(plan.candidate for plan in front[:FRONT]), *inside[SURE:LAST]]
        self._fine = self._choose_fidelity(asked[: SURE + 1])
        fine = self._score_all(self._select_affordable(asked, self._fine, 1.0), self._fine)
        scores = {**middle, **fine}
        plans = {each: self._make_plan(each, found) for each, found in fine.items()}
        closest = [plans[each] for each in _rank_all(fine) if self._feasible.is_inside(each, fine[each])]
        others = [each for each in inside if each not in fine and each not in self._refused]
        rest = [self._make_plan(each, middle[each]) for each in others]
        ranked = [*closest, *rest]
        if not ranked:  # a plan within the limits at coarse fidelity may exceed them at a finer one
            self._feasible.refuse(scores, self._refused)
        return SearchResult(
            ranked=ranked,
            tied=select_tied(closest or ranked[:1], self._problem.profile.step_noise),
            baseline=plans.get(presets[BASELINE]) or self._find_plan(presets[BASELINE]),
            current=self._make_plan(current, scores[current]) if current in scores else None,
            front=pareto(ranked),
            why_not=self._why_not(presets, ranked[0]),
            num_scored=self._num_scored,
            num_pruned=self._feasible.num_pruned,
        )

    def _make_seed(self, candidate: Candidate) -> Candidate:
        """Returns a candidate with the fields that follow from the profile."""
        if self._workload.turns <= 1:
            return candidate
        return candidate.changed({"prefill_cost": prefill_cost(self._problem.profile)}) or candidate

    def _find_plan(self, candidate: Candidate) -> Planned | None:
        """Returns the plan of a candidate by its coarse score; None without one."""
        return self._make_plan(candidate, self._seen[candidate]) if candidate in self._seen else None

    def _choose_fidelity(self, candidates: Sequence[Candidate]) -> Fidelity:
        """Returns the final fidelity: the whole cluster, or the largest model of it that the effort allows."""
        turns = self._middle.turns
        for each in dict.fromkeys((1, turns)):
            for scale in self._scales[2:]:
                fidelity = replace(self._fine, scale=scale, turns=each)
                if self._effort.affords(sum(self._count_samples(candidate, fidelity) for candidate in candidates)):
                    return fidelity
        return replace(self._fine, scale=self._scales[1], turns=turns)

    def _select_affordable(self, candidates: Iterable[Candidate], fidelity: Fidelity, share: float) -> list[Candidate]:
        """Returns the candidates that a share of the remaining effort allows to simulate, the first ones first."""
        found, num_samples = list[Candidate](), 0
        for each in dict.fromkeys(candidates):
            size = self._count_samples(each, fidelity)
            if self._effort.affords(int((num_samples + size) / share)):
                num_samples += size
                found.append(each)
        return found

    def _select_promising(self) -> list[Candidate]:
        """Returns the fastest candidates, and candidates of the coarse front that are less stale or less biased."""
        inside = {each: score for each, score in self._seen.items() if self._feasible.is_inside(each, score)}
        plans = [self._make_plan(each, score) for each, score in inside.items()]
        fastest, front = _select_unlike(inside), (plan.candidate for plan in pareto(plans)[:8])
        return list(dict.fromkeys([*fastest[:8], *front, *_select_unbiased(fastest, inside)[:2]]))

    def _climb_hill(self) -> None:
        """Tries the neighbours of the best until the best stops improving or half of the effort is used."""
        best, idle, expanded = 0.0, 0, set[Candidate]()
        while idle < ROUNDS_WITHOUT_GAIN and self._effort.share_left > SEARCH_LEAVES:
            beam = [each for each in self._select_best(4 * BEAM) if each not in expanded][:BEAM]
            if not beam:
                return
            expanded.update(beam)
            roles = self._workload.roles
            around = [
                replace(near, name=each.name or "planned")
                for each in beam
                for near in neighbours(
                    each,
                    spans=self._workload.spans,
                    has_reference="reference" in roles,
                    has_env="env" in roles,
                    has_tools=self._workload.turns > 1 and "env" not in roles,
                    pools=self._workload.pools,
                )
            ]
            self._try_candidates(around)
            found = self._select_best(1)
            now = self._seen[found[0]].tokens_per_s if found else 0.0
            idle, best = (0, now) if now > best * 1.005 else (idle + 1, max(now, best))

    def _vary_spans(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Returns the candidates with each number of devices per engine."""
        return [
            replace(each, layout=replace(each.layout, span=span))
            for each in candidates
            for span in self._workload.spans
        ]

    def _try_candidates(self, candidates: Iterable[Candidate]) -> None:
        """Simulates at coarse fidelity the candidates that may beat the best so far, the most promising first."""
        # The baseline is among the first: it needs few steps, so that even a short search has a plan to return. So is
        # the current schedule, because a change needs its prediction.
        fresh = sorted(
            self._estimate_candidates(candidates), key=lambda pair: (pair[1].name not in (BASELINE, CURRENT), pair[0])
        )
        for start in range(0, len(fresh), 16):
            if self._effort.share_left <= SEARCH_LEAVES and self._select_best(1):
                return
            limit = self._limit_s()
            promising = [each for least_s, each in fresh[start : start + 16] if least_s <= limit]
            self._feasible.num_pruned += len(fresh[start : start + 16]) - len(promising)
            if promising:
                self._seen.update(self._score_all(promising, self._coarse))
                self._report_best()

    def _estimate_candidates(self, candidates: Iterable[Candidate]) -> Iterator[tuple[float, Candidate]]:
        """Yields the lower estimate of a step's seconds, and the candidate, for each new one that fits.

        On large clusters the checks take milliseconds each, so they end when half of the effort is used.
        """
        found, problem = self._feasible, self._problem
        for each in dict.fromkeys(candidates):
            if found.least_s and self._effort.share_left <= SEARCH_LEAVES:
                return
            if each in self._seen or each in self._refused or problem.limits.refusal(each.rest):
                continue
            schedule = found.find(each)
            if schedule is None:
                continue
            if each not in found.least_s:
                found.least_s[each] = least_step_s(schedule, problem.profile, problem.workload, problem.devices)
            yield found.least_s[each], each

    def _limit_s(self) -> float:
        """Returns the lower bound of a step above which a candidate cannot beat the best."""
        best = self._select_best(1)
        if not best:
            return math.inf
        top = self._seen[best[0]]
        # Seconds of a step that trains on all generated samples: the best may leave some out. A sixth more is allowed,
        # because the bound is an expectation.
        return 1.17 * top.step_s / (1 + min(0.0, top.length_shift))

    def _report_best(self) -> None:
        """Reports the best schedule so far."""
        best = self._select_best(1)
        found = f", best so far {self._seen[best[0]].step_s:.4g} s per step" if best else ""
        self._effort.report(f"{self._num_scored} schedules simulated{found}")

    def _score_all(self, candidates: Iterable[Candidate], fidelity: Fidelity) -> dict[Candidate, Score]:
        chosen = [each for each in dict.fromkeys(candidates) if self._feasible.find(each)]
        count, pools = self._workload.on_model(fidelity.scale)
        scaled = [(each, each.on(count, pools)) for each in chosen]
        ready = {each: (schedule, fidelity) for each, schedule in scaled if schedule}
        fresh = {task: each for each, task in ready.items() if task not in self._simulated}
        found = {task: score for task, score in zip(fresh, self._score([*fresh]), strict=True) if score is not None}
        self._effort.spend(sum(self._count_samples(fresh[task], fidelity) for task in found))
        self._num_scored += len(found)
        self._feasible.reasons += [each.reason for each in found.values() if isinstance(each, Refused)]
        self._simulated.update(found)
        scores = {each: self._simulated[task] for each, task in ready.items() if task in self._simulated}
        self._refused.update({each: score.reason for each, score in scores.items() if isinstance(score, Refused)})
        return {each: score for each, score in scores.items() if isinstance(score, Score)}

    def _count_samples(self, candidate: Candidate, fidelity: Fidelity) -> int:
        """Returns the number of samples to simulate."""
        steps = fidelity.num_steps(candidate.rest)
        return steps * self._workload.requests_per_step // (fidelity.scale * fidelity.turns)

    def _select_best(self, count: int) -> list[Candidate]:
        inside = {each: score for each, score in self._seen.items() if self._feasible.is_inside(each, score)}
        return _select_unlike(inside)[:count]

    def _make_plan(self, candidate: Candidate, score: Score) -> Planned:
        schedule = self._feasible.schedules[candidate]
        return Planned(
            name=candidate.name,
            schedule=schedule,
            score=score,
            staleness_bound=schedule.staleness_bound,
            candidate=candidate,
        )

    def _refuse_untrained(self) -> None:
        """Raises UserError if no simulated schedule trained a token: there is no speed to compare."""
        if self._seen and not any(score.tokens_per_s for score in self._seen.values()):
            reward = self._problem.profile.reward
            raise UserError(
                "no schedule trained a token in the simulation, so their speeds cannot be compared: the samples were "
                f"filtered or failed. In the profile {reward.solve_rate:.0%} of the responses are right, and "
                f"{reward.fail_share:.0%} could not be scored. Profile a model that solves some of the prompts, or "
                "take an algorithm that keeps groups of equal rewards, such as algorithm=grpo."
            )

    def _why_not(self, presets: Mapping[str, Candidate], best: Planned) -> list[WhyNot]:
        """Returns the losses of each preset against the best, at coarse fidelity; includes presets out of bounds."""
        told = []
        known = self._seen.keys() | self._refused.keys()
        outside = [each for each in (*presets.values(), best.candidate) if each not in known]
        shorter = replace(self._coarse, steps=2)
        self._seen.update(self._score_all(self._select_affordable(outside, shorter, 1.0), shorter))
        top = self._seen.get(best.candidate)
        for name, candidate in presets.items():
            if candidate == best.candidate:
                continue
            score = self._seen.get(candidate)
            if not score or not top:
                fits = self._feasible.find(candidate) is not None
                reason = "was not simulated: the time was over" if fits else self._feasible.explain(candidate)
                reason = self._refused.get(candidate, reason)
                told.append(WhyNot(preset=name, ratio=None, reason=reason))
                continue
            if not score.tokens_per_s or not top.tokens_per_s:
                told.append(WhyNot(preset=name, ratio=None, reason="no token was trained in the simulated steps"))
                continue
            ratio = score.tokens_per_s / top.tokens_per_s
            # Device-seconds per trained token, relative to the best plan's.
            more = {bin: share / ratio - top.bins.get(bin, 0.0) for bin, share in score.bins.items()}
            loses = sorted(((bin, by) for bin, by in more.items() if by > 0.02), key=lambda pair: -pair[1])[:3]
            reason = self._problem.limits.refusal(self._feasible.schedules[candidate]) or ""
            told.append(WhyNot(preset=name, ratio=ratio, loses=loses, reason=reason))
        return told


def _rank_all(scores: Mapping[Candidate, Score]) -> list[Candidate]:
    return sorted(scores, key=lambda each: -scores[each].tokens_per_s)


def _select_unbiased(candidates: Iterable[Candidate], scores: Mapping[Candidate, Score]) -> list[Candidate]:
    """Returns the candidates whose trained responses are as long as the generated ones."""
    return [each for each in candidates if scores[each].is_unbiased]


def _select_unlike(scores: Mapping[Candidate, Score]) -> list[Candidate]:
    """Returns the candidates, the fastest first, without those that are the same as a faster one."""
    found: list[Candidate] = []
    last: Score | None = None
    for each in _rank_all(scores):
        score = scores[each]
        if (
            last is None
            or score.tokens_per_s < (1 - ALIKE) * last.tokens_per_s
            or score.length_shift != last.length_shift
        ):
            found.append(each)
            last = score
    return found
