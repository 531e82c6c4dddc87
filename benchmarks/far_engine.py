"""Round trips and time of a run whose engine is at the other end of a link of 50 ms, on the virtual clock.

    python benchmarks/far_engine.py [--steps 12] [--round-trip 0.05] [--json far_engine.json]

The flow, the driver and the rule for the length of a call (`CallLength`) are the real ones; the engine and the trainer
are cost models of a small model on two devices (10 ms for a decode step). "Fixed calls" end 10 ms after their start if
a sequence has finished; "longer calls" follow the rule.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from interlace.algorithms.base import Needs
from interlace.core.progress import Progress
from interlace.core.types import Request, SampleKey
from interlace.forecast.virtual import SimulatedRole
from interlace.runtime.rank import Rank, RankResult
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.worker import WorkerContext, operation
from interlace.schedule.placement import Device
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from interlace.workers.rollout import MIN_CALL_S, CallLength

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.cost_workers import CheckedEngine, Costs
from tests.support.sim_run import Workload, simulate

PRESETS, TOKENS = ("areal", "verl-colocated"), (64, 512)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    preset: str
    max_tokens: int
    round_trip_s: float
    is_longer: bool
    calls_per_step: float
    seconds: float


class FarEngine(CheckedEngine):
    """Simulated engine whose calls last as long as the calls of a rollout worker."""

    def __init__(self, context: WorkerContext, is_longer: bool, **given: Any) -> None:
        super().__init__(context, **given)
        self._length, self._is_longer = CallLength(), is_longer

    @operation(bin="generate")
    async def serve(
        self, requests: Sequence[Request], aborts: Sequence[str], ended: Sequence[SampleKey] = ()
    ) -> Progress:
        """See CheckedEngine."""
        least_s = self._length.begin(self._loop.now_s)
        self._costs = self._costs.model_copy(update={"min_call_s": least_s if self._is_longer else MIN_CALL_S})
        progress = await super().serve(requests, aborts, ended)
        self._length.end(self._loop.now_s, has_more=bool(progress.num_running + progress.num_waiting))
        return progress


@dataclass(frozen=True, kw_only=True)
class FarCosts(Costs):
    """Costs of workers with a far engine."""

    is_longer: bool

    def roles(self) -> dict[str, SimulatedRole]:
        """See Costs."""
        roles = dict(super().roles())
        given: dict[str, Any] = roles["rollout"].factory.keywords  # type: ignore[attr-defined]  # it is a partial
        roles["rollout"] = SimulatedRole(partial(FarEngine, is_longer=self.is_longer, **given), FarEngine)
        return roles


@dataclass
class FarRank:
    """Rank at the other end of a link with a delay."""

    rank: Rank
    round_trip_s: float
    num_served: int = 0

    async def call(self, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> RankResult:
        self.num_served += method == "serve"
        await asyncio.sleep(self.round_trip_s / 2)
        result = await self.rank.call(method, args, kwargs)
        await asyncio.sleep(self.round_trip_s / 2)
        return result

    def call_now(self, method: str, args: tuple[object, ...]) -> None:
        asyncio.get_running_loop().call_later(self.round_trip_s / 2, self.rank.call_now, method, args)

    async def close(self) -> None:
        await self.rank.close()


def measure(preset: str, max_tokens: int, round_trip_s: float, *, is_longer: bool, steps: int) -> Row:
    """Simulates one run."""
    far: list[FarRank] = []

    def wrap(rank: Rank, context: WorkerContext) -> Rank:
        if not context.group.startswith("rollout"):
            return rank
        far.append(FarRank(rank, round_trip_s))
        return far[-1]

    def cluster(devices: tuple[Device, ...], schedule: Schedule) -> SimCluster:
        return SimCluster(devices, schedule, hang_after_s=1e6, around=wrap)

    work = Workload(
        prompts_per_step=16, samples_per_prompt=8, num_steps=steps, num_devices=2, needs=Needs(),
        costs=FarCosts(max_tokens=max_tokens, is_longer=is_longer),
    )  # fmt: skip
    record = simulate(load_schedule(preset), work, make_cluster=cluster)
    calls = sum(rank.num_served for rank in far) / steps
    return Row(
        preset=preset, max_tokens=max_tokens, round_trip_s=round_trip_s, is_longer=is_longer,
        calls_per_step=calls, seconds=record.seconds,
    )  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--round-trip", type=float, default=0.05, help="seconds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    print("| schedule | most tokens | calls | round trips per step | time against no delay |\n|---|---|---|---|---|")
    for preset in PRESETS:
        for tokens in TOKENS:
            base = measure(preset, tokens, 0.0, is_longer=True, steps=given.steps)
            rows.append(base)
            for is_longer in (False, True):
                row = measure(preset, tokens, given.round_trip, is_longer=is_longer, steps=given.steps)
                rows.append(row)
                calls = "longer" if is_longer else "fixed"
                ratio = row.seconds / base.seconds
                print(f"| {preset} | {tokens} | {calls} | {row.calls_per_step:.0f} | {ratio:.2f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
