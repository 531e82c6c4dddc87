"""The planner: searches schedules for a workload, scored by a given function, within limits that the user sets.

Analytic bounds and memory prune candidates before any is simulated. A beam search at coarse fidelity (fewer devices,
and fewer samples that cost more) finds promising candidates, and successive halving spends more simulated steps on
fewer of them. The remaining effort determines how many candidates are simulated, and how closely. Once it is spent, the
search returns the best plan so far. The search has no clock: with a SampleEffort, the same arguments give the same
plan.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from interlace.core.errors import UserError
from interlace.forecast.search.bounds import StepEstimate, Workload, coarser, estimate_step, prefill_cost
from interlace.forecast.search.candidates import Candidate, by_kind, neighbours, plain
from interlace.forecast.search.feasible import FeasibleSchedules, SearchProblem, explain_presets
from interlace.forecast.search.plans import (
    Fidelity,
    Planned,
    Refused,
    SampleEffort,
    Score,
    Scorer,
    SearchResult,
    choose_coarse,
    pareto,
    select_tied,
)
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule

BASELINE = "verl-colocated"
CURRENT = "current"
"""Name of the plan that a run uses now."""
EARLIER = "earlier"
"""Name of the run's earlier plans."""
SURE, LAST = 2, 6
"""Minimum and maximum number of best plans that are simulated on the whole cluster."""
SEARCH_LEAVES = 0.5
"""Share of the effort that is reserved for a closer prediction of the best plans."""
START_LEAVES = 0.75
"""Share of the effort that the first candidates leave, if they are many."""
MIDDLE_SHARE = 0.7
"""Share of the remaining effort for the simulations at the middle fidelity."""
FRONT = 5
"""Plans of the Pareto front that are simulated closely although faster plans exist."""
FIRST = 3
"""Alternatives of a decision that are tried first."""
CHUNK = 8
"""Candidates between two checks of the effort and of the best step."""
LEAST = 1.17
"""Lower estimate of a step's seconds, relative to the best candidate, above which a candidate is not simulated. It may
be a sixth more, because the estimate is an expectation."""
BEAM = 3
"""Candidates whose neighbours are tried in one round of the search."""
CLOSER = 6
"""Candidates that are simulated again, at the middle fidelity if the effort allows, before the last ones are chosen."""
SLOW = 1.5
"""Seconds of a step, relative to the best candidate, above which a coarse simulation ends early."""
ROUNDS_WITHOUT_GAIN = 2
ALIKE = 0.005
"""Relative difference in speed below which plans of equal length shift count as the same."""


def search(
    problem: SearchProblem,
    score: Scorer,
    *,
    effort: SampleEffort,
    current: Schedule | None = None,
    earlier: Iterable[Candidate] = (),
) -> SearchResult:
    """Searches for schedules. current: the schedule that a run uses; it is predicted as closely as the best. earlier:
    candidates from which the search begins, in addition to the presets.

    Raises UserError if nothing fits or the limits contradict each other.
    """
    found = _Search(problem, score, effort)
    begun = [replace(each, name=EARLIER) for each in earlier]
    return found.run(Candidate.of(current, CURRENT, problem.devices) if current else None, begun)


class _Search:
    def __init__(self, problem: SearchProblem, score: Scorer, effort: SampleEffort) -> None:
        self._problem, self._workload = problem, problem.workload
        workload = problem.workload
        self._score = score
        self._scales = coarser(workload)
        requests = workload.requests_per_step
        # The search takes half of the effort, the middle fidelity at most MIDDLE_SHARE of the rest.
        coarse_steps = 6 if requests < 512 else 4 if requests < 16_384 else 2
        self._coarse = choose_coarse(workload, problem.profile, coarse_steps)
        turns = self._coarse.turns
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

    def run(self, current: Candidate | None, earlier: Sequence[Candidate] = ()) -> SearchResult:
        """Searches at coarse fidelity, then applies successive halving."""
        presets = {name: _make_seed(Candidate.of(load_schedule(name), name), self._problem) for name in preset_names()}
        seeds = [_make_seed(each, self._problem) for each in plain()]
        mixed = [each for start in (*seeds, *presets.values()) for each in by_kind(start, self._workload.pools)]
        start = [*([current] if current else []), presets[BASELINE], *earlier, *presets.values()]
        self._try_candidates([*start, *_vary_spans([*seeds, *mixed], self._workload.spans)], leaves=START_LEAVES)
        self._vary_decisions()
        self._climb_hill()
        chosen = self._select_promising()
        if not chosen:
            self._feasible.refuse(self._seen, self._refused)
        self._refuse_untrained()
        if current in self._seen:
            chosen = list(dict.fromkeys([current, *chosen]))
        self._middle = self._choose_middle(chosen[:CLOSER])
        closer = self._score_all(self._select_affordable(chosen, self._middle, MIDDLE_SHARE), self._middle)
        middle = {each: closer.get(each, self._seen[each]) for each in chosen if each not in self._refused}
        others = {each: score for each, score in middle.items() if each not in closer}
        inside = [
            each for each in (*_rank_all(closer), *_rank_all(others)) if self._feasible.is_inside(each, middle[each])
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
        fidelity = self._choose_fidelity(asked[: SURE + 1])
        fine = self._score_all(self._select_affordable(asked, fidelity, 1.0), fidelity) if fidelity else closer
        scores = {**middle, **fine}
        plans = {each: self._make_plan(each, found) for each, found in fine.items()}
        closest = [plans[each] for each in _rank_all(fine) if self._feasible.is_inside(each, fine[each])]
        last = [each for each in inside if each not in fine and each not in self._refused]
        rest = [self._make_plan(each, middle[each]) for each in last]
        ranked = [*closest, *rest]
        if not ranked:  # a plan within the limits at coarse fidelity may exceed them at a finer one
            self._feasible.refuse(scores, self._refused)
        return SearchResult(
            ranked=ranked,
            tied=select_tied(closest or ranked[:1], self._problem.profile.step_noise),
            baseline=plans.get(presets[BASELINE]) or self._find_plan(presets[BASELINE]),
            current=self._make_plan(current, scores[current]) if current in scores else None,
            front=pareto(ranked),
            why_not=explain_presets(
                presets, ranked[0].candidate, self._simulate_presets(presets, ranked[0]), self._refused, self._feasible
            ),
            num_scored=self._num_scored,
            num_pruned=self._feasible.num_pruned,
        )

    def _find_plan(self, candidate: Candidate) -> Planned | None:
        """Returns the plan of a candidate by its coarse score; None without one."""
        return self._make_plan(candidate, self._seen[candidate]) if candidate in self._seen else None

    def _choose_middle(self, candidates: Sequence[Candidate]) -> Fidelity:
        """Returns the middle fidelity. If the effort does not allow it, the coarse model with all samples replaces it,
        or the coarse model with more steps.
        """
        for fidelity in (self._middle, *([replace(self._coarse, thin=1)] if self._coarse.thin > 1 else [])):
            num_samples = sum(self._count_samples(each, fidelity) for each in candidates)
            if self._effort.affords(int(num_samples / MIDDLE_SHARE)):
                return fidelity
        return replace(self._coarse, steps=2 * self._coarse.steps)

    def _choose_fidelity(self, candidates: Sequence[Candidate]) -> Fidelity | None:
        """Returns the final fidelity: the whole cluster, or the largest model of it that the effort allows.

        None if the effort allows none that is closer than the middle one.
        """
        turns = self._middle.turns
        for each in dict.fromkeys((1, turns)):
            for scale in self._scales[2:]:
                fidelity = replace(self._fine, scale=scale, turns=each)
                if self._effort.affords(sum(self._count_samples(candidate, fidelity) for candidate in candidates)):
                    return fidelity
        return None

    def _select_affordable(self, candidates: Iterable[Candidate], fidelity: Fidelity, share: float) -> list[Candidate]:
        """Returns the candidates that a share of the remaining effort allows to simulate, the first ones first."""
        found, num_samples = list[Candidate](), 0
        for each in dict.fromkeys(candidates):
            num_samples += self._count_samples(each, fidelity)
            # A later one that needs less effort is not simulated instead: it would be compared with none of the best.
            if not self._effort.affords(int(num_samples / share)):
                break
            found.append(each)
        return found

    def _select_promising(self) -> list[Candidate]:
        """Returns the fastest candidates, and candidates of the coarse front that are less stale or less biased."""
        inside = {each: score for each, score in self._seen.items() if self._feasible.is_inside(each, score)}
        plans = [self._make_plan(each, score) for each, score in inside.items()]
        fastest, front = _select_unlike(inside), (plan.candidate for plan in pareto(plans)[:8])
        return list(dict.fromkeys([*fastest[:8], *front, *_select_unbiased(fastest, inside)[:2]]))

    def _vary_decisions(self) -> None:
        """Varies one decision of the best candidate after the other, until none of them improves it.

        Each improvement counts at once, so a round costs as much as a round of `_climb_hill` and may change all
        decisions. Until a round brings no gain, only the most promising alternatives of each decision are tried.
        """
        base, place, unchanged = self._select_best(1), 0, 0
        while base and self._effort.share_left > SEARCH_LEAVES:
            decisions = _list_neighbours(base[0], self._workload)
            if unchanged == 2 * len(decisions):
                return
            self._try_candidates(decisions[place], most=FIRST if unchanged < len(decisions) else None)
            place = (place + 1) % len(decisions)
            best = self._select_best(1)
            unchanged = unchanged + 1 if best == base else 0
            base = best

    def _climb_hill(self) -> None:
        """Tries the neighbours of the best until the best stops improving or half of the effort is used."""
        best, idle, expanded = 0.0, 0, set[Candidate]()
        while idle < ROUNDS_WITHOUT_GAIN and self._effort.share_left > SEARCH_LEAVES:
            beam = [each for each in self._select_best(4 * BEAM) if each not in expanded][:BEAM]
            if not beam:
                return
            expanded.update(beam)
            decisions = [decision for each in beam for decision in _list_neighbours(each, self._workload)]
            self._try_candidates(chain.from_iterable(decisions))
            found = self._select_best(1)
            now = self._seen[found[0]].tokens_per_s if found else 0.0
            idle, best = (0, now) if now > best * 1.005 else (idle + 1, max(now, best))

    def _try_candidates(
        self, candidates: Iterable[Candidate], *, leaves: float = SEARCH_LEAVES, most: int | None = None
    ) -> None:
        """Simulates at coarse fidelity the candidates that may beat the best so far, the most promising first.

        leaves: share of the effort at which this ends. most: largest number of candidates.
        """
        # The baseline is among the first: it needs few steps, so that even a short search has a plan to return. So is
        # the current schedule, because a change needs its prediction.
        fresh = sorted(
            self._estimate_candidates(candidates),
            key=lambda pair: (pair[1].name not in (BASELINE, CURRENT, EARLIER), pair[0].likely_s),
        )[:most]
        for start in range(0, len(fresh), CHUNK):
            if self._effort.share_left <= leaves and self._select_best(1):
                return
            best_s = self._best_step_s()
            promising = [each for estimate, each in fresh[start : start + CHUNK] if estimate.least_s <= LEAST * best_s]
            self._feasible.num_pruned += len(fresh[start : start + CHUNK]) - len(promising)
            if promising:
                self._seen.update(self._score_all(promising, replace(self._coarse, most_step_s=SLOW * best_s)))
                self._report_best()

    def _estimate_candidates(self, candidates: Iterable[Candidate]) -> Iterator[tuple[StepEstimate, Candidate]]:
        """Yields the estimates of a step, and the candidate, for each new one that fits.

        On large clusters the checks take milliseconds each, so they end when half of the effort is used.
        """
        found, problem = self._feasible, self._problem
        for each in dict.fromkeys(candidates):
            if found.estimates and self._effort.share_left <= SEARCH_LEAVES:
                return
            if each in self._seen or each in self._refused or problem.limits.refusal(each.rest):
                continue
            schedule = found.find(each)
            if schedule is None:
                continue
            if each not in found.estimates:
                found.estimates[each] = estimate_step(schedule, problem.profile, problem.workload, problem.devices)
            yield found.estimates[each], each

    def _best_step_s(self) -> float:
        """Returns the seconds of the best candidate's step if it trained on all generated samples; it may omit some."""
        best = self._select_best(1)
        if not best:
            return math.inf
        top = self._seen[best[0]]
        return top.step_s / (1 + min(0.0, top.length_shift))

    def _report_best(self) -> None:
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
        self._effort.spend(sum(self._count_samples(fresh[task], fidelity, found[task]) for task in found))
        self._num_scored += len(found)
        self._feasible.reasons += [each.reason for each in found.values() if isinstance(each, Refused)]
        self._simulated.update(found)
        scores = {each: self._simulated[task] for each, task in ready.items() if task in self._simulated}
        self._refused.update({each: score.reason for each, score in scores.items() if isinstance(score, Refused)})
        return {each: score for each, score in scores.items() if isinstance(score, Score)}

    def _count_samples(self, candidate: Candidate, fidelity: Fidelity, score: Score | Refused | None = None) -> int:
        """Returns the number of samples of a simulation, or of one to come without a score."""
        steps = (score.num_steps if isinstance(score, Score) else 0) or fidelity.num_steps(candidate.rest)
        return fidelity.count_samples(steps, self._workload)

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

    def _simulate_presets(self, presets: Mapping[str, Candidate], best: Planned) -> Mapping[Candidate, Score]:
        """Returns all coarse scores, also of presets out of bounds, as far as the effort allows."""
        known = self._seen.keys() | self._refused.keys()
        outside = [each for each in (*presets.values(), best.candidate) if each not in known]
        shorter = replace(self._coarse, steps=2)
        self._seen.update(self._score_all(self._select_affordable(outside, shorter, 1.0), shorter))
        return self._seen

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


def _make_seed(candidate: Candidate, problem: SearchProblem) -> Candidate:
    """Returns a candidate with the fields that follow from the profile."""
    if problem.workload.turns <= 1:
        return candidate
    return candidate.changed({"prefill_cost": prefill_cost(problem.profile)}) or candidate


def _vary_spans(candidates: Iterable[Candidate], spans: Iterable[int]) -> list[Candidate]:
    """Returns the candidates with each number of devices per engine."""
    return [replace(each, layout=replace(each.layout, span=span)) for each in candidates for span in spans]


def _list_neighbours(candidate: Candidate, workload: Workload) -> list[list[Candidate]]:
    """Returns the candidates that differ in one decision, a list for each decision."""
    roles = workload.roles
    found = neighbours(
        candidate,
        spans=workload.spans,
        has_reference="reference" in roles,
        has_env="env" in roles,
        has_tools=workload.turns > 1 and "env" not in roles,
        pools=workload.pools,
    )
    return [[replace(near, name=candidate.name or "planned") for near in decision] for decision in found]


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
