"""Searches of the planner on a small cluster, with scores by a rule instead of simulations."""

from collections.abc import Callable, Sequence

from interlace.forecast.profile.types import Lengths, Profile, RolloutCosts, TrainCosts
from interlace.forecast.search import planner
from interlace.forecast.search.bounds import Workload
from interlace.forecast.search.feasible import SearchProblem
from interlace.forecast.search.plans import Fidelity, PlanLimits, SampleEffort, Score, SearchResult
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

PROFILE = Profile(
    device="a test's",
    device_memory_bytes=100,
    rollout=RolloutCosts(steps=((1, 0.01), (64, 0.02)), kv_tokens=10_000, state_bytes=10, device_bytes=10),
    actor=TrainCosts(token_s=1e-4, state_bytes=60),
    lengths=Lengths(median=100),
)
WORKLOAD = Workload(num_devices=8, prompts_per_step=16, samples_per_prompt=4, max_new_tokens=1000, spans=(1, 2))


def devices(count: int, memory: int = 100) -> tuple[Device, ...]:
    return tuple(Device(index=n, pool="sim", pool_index=n, memory_bytes=memory) for n in range(count))


def score(tokens_per_s: float, *, shift: float = 0.0) -> Score:
    return Score(
        step_s=1000 / tokens_per_s, error_s=0.0, tokens_per_s=tokens_per_s, goodput=0.5, staleness_mean=0.0,
        staleness_max=0.0, length_shift=shift, bins={"train": 0.5, "idle": 0.5},
    )  # fmt: skip


def search(
    profile: Profile,
    workload: Workload,
    found: tuple[Device, ...],
    limits: PlanLimits,
    scorer: "InventedScores",
    *,
    effort: SampleEffort,
) -> SearchResult:
    problem = SearchProblem(profile=profile, workload=workload, devices=found, limits=limits)
    return planner.search(problem, scorer, effort=effort)


class InventedScores:
    """Scorer that applies a rule to each schedule and records its tasks."""

    def __init__(self, rule: Callable[[Schedule], Score]) -> None:
        self.rule = rule
        self.asked: list[tuple[Schedule, Fidelity]] = []

    def __call__(self, tasks: Sequence[tuple[Schedule, Fidelity]]) -> list[Score]:
        self.asked += tasks
        return [self.rule(schedule) for schedule, _ in tasks]
