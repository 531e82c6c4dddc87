"""Reasons why a preset is slower than the best plan, or is not among the plans."""

from collections.abc import Mapping

from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.feasible import FeasibleSchedules
from interlace.forecast.search.plans import Score, WhyNot


def explain_presets(
    presets: Mapping[str, Candidate],
    best: Candidate,
    scores: Mapping[Candidate, Score],
    refused: Mapping[Candidate, str],
    feasible: FeasibleSchedules,
) -> list[WhyNot]:
    """Returns the losses of each preset against the best plan; includes presets out of bounds.

    scores: at coarse fidelity. refused: candidates whose simulation ended with an error.
    """
    told, top = [], scores.get(best)
    for name, candidate in presets.items():
        if candidate == best:
            continue
        score = scores.get(candidate)
        if not score or not top:
            fits = feasible.find(candidate) is not None
            reason = "was not simulated: the time was over" if fits else feasible.explain(candidate)
            told.append(WhyNot(preset=name, ratio=None, reason=refused.get(candidate, reason)))
            continue
        if not score.tokens_per_s or not top.tokens_per_s:
            told.append(WhyNot(preset=name, ratio=None, reason="no token was trained in the simulated steps"))
            continue
        ratio = score.tokens_per_s / top.tokens_per_s
        # Device-seconds per trained token, relative to the best plan's.
        more = {bin: share / ratio - top.bins.get(bin, 0.0) for bin, share in score.bins.items()}
        loses = sorted(((bin, by) for bin, by in more.items() if by > 0.02), key=lambda pair: -pair[1])[:3]
        told.append(
            WhyNot(preset=name, ratio=ratio, loses=loses, reason=feasible.find_excess(feasible.schedules[candidate]))
        )
    return told
