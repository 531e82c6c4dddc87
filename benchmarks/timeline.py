"""Cost of the timeline: on against off, step by step in one run, on the quick start and on the virtual clock.

Steps alternate, in random order within each block of three:

    written   spans are kept, the ledger is computed from them, timeline.json is written (as in `interlace train`)
    ledger    the same without timeline.json (logging.timeline=false)
    off       spans return a call's duration and are dropped; the ledger gets nothing

The CPU time of the whole process from one step's start to the next one's is compared, because other work on the machine
lengthens wall time. A line is the median over blocks of a step's time divided by its block's `off`, with the quartiles
of the blocks and a 95 % interval of the median (bootstrap).

Steps of the quick start differ by more than the cost of the timeline, so this cost is also timed from inside: CPU
seconds in `begin`, `end`, `serve`, `take` with its recorder, and the ledger, including the timers' cost, as a share of
the steps in which they ran. This is the relevant number; the ratio shows that no cost is hidden elsewhere. On the
virtual clock only the runtime itself computes, so there it is the share of the runtime's own work.

    python benchmarks/timeline.py [--steps 150] [--json timeline.json]
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest.mock import patch

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.simulate import Simulation, simulate
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train
from interlace.runtime.goodput import LedgerBuilder
from interlace.runtime.timeline import EngineCall, Recorder, Records, Span, Timeline

ARMS = ("written", "ledger", "off")
WARM_STEPS = 3
"""Uncounted steps at the start."""
ROUNDS = 2000
"""Rounds of the bootstrap."""


@dataclass
class Step:
    """Cost of one step, in seconds."""

    arm: str
    wall_s: float
    cpu_s: float
    inside_s: float
    num_spans: int


@dataclass(kw_only=True)
class Switched(Timeline):
    """A timeline that is on in some steps and off in others."""

    steps: list[Step] = field(default_factory=list)
    _arm: str = "written"
    _block: list[str] = field(default_factory=list)
    _order: random.Random = field(default_factory=lambda: random.Random(0))
    _num_takes: int = 0
    _since: tuple[float, float] = (0.0, 0.0)
    _inside_s: float = 0.0
    _num_spans: int = 0

    def begin(self, span: Span) -> None:
        if self._arm != "off":
            since_s = time.thread_time()
            super().begin(span)
            self._inside_s += time.thread_time() - since_s

    def end(self, span: Span, start_s: float, end_s: float) -> None:
        self._num_spans += 1
        if self._arm != "off" or span in self._running:
            self._running[span] = None  # begun while the timeline was off
            since_s = time.thread_time()
            super().end(span, start_s, end_s)
            self._inside_s += time.thread_time() - since_s
        else:
            span.start_s, span.end_s = start_s, end_s

    def serve(self, served: EngineCall) -> None:
        if self._arm != "off":
            with self.timed():
                super().serve(served)

    def take(self) -> Records:
        with self.timed():
            records = super().take()
        self._num_takes += 1
        if self._num_takes % 2:  # one take ends a step, the next begins another
            self._turn()
        return records

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time of the block as the timeline's work."""
        start_s = time.thread_time()
        try:
            yield
        finally:
            self._inside_s += time.thread_time() - start_s

    @contextmanager
    def record_with(self, recorder: Recorder) -> Iterator[None]:
        with super().record_with(_Gated(recorder, self)):
            yield

    @property
    def is_written(self) -> bool:
        """True if a recorder receives this step."""
        return self._arm == "written"

    def _turn(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self._num_takes > 1:
            wall_s, cpu_s = (after - before for before, after in zip(self._since, now, strict=True))
            self.steps.append(Step(self._arm, wall_s, cpu_s, self._inside_s, self._num_spans))
        if not self._block:
            self._block = self._order.sample(ARMS, len(ARMS))
        self._arm, self._since, self._inside_s, self._num_spans = self._block.pop(), now, 0.0, 0


class _Gated:
    """Recorder that forwards only some steps."""

    def __init__(self, recorder: Recorder, timeline: Switched) -> None:
        self._recorder, self._timeline = recorder, timeline

    def keep(self, records: Records) -> None:
        if self._timeline.is_written:
            self._recorder.keep(records)

    def close(self, records: Records) -> None:
        self._recorder.close(records)


def measured(run: Callable[[], object]) -> list[Step]:
    """Returns the steps of a run whose cluster has a switched timeline; whole blocks only."""
    made: list[Switched] = []

    def make(**given: object) -> Switched:
        made.append(Switched(**given))  # type: ignore[arg-type]
        return made[-1]

    def timed(method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            with made[-1].timed():
                return method(*args, **kwargs)

        return call

    with (
        patch("interlace.runtime.cluster.Timeline", make),
        patch.object(LedgerBuilder, "step", timed(LedgerBuilder.step)),
        patch.object(LedgerBuilder, "between", timed(LedgerBuilder.between)),
    ):
        run()
    steps = made[-1].steps[WARM_STEPS - WARM_STEPS % len(ARMS) :]
    return steps[: len(steps) - len(steps) % len(ARMS)]


def quick_start(num_steps: int, folder: Path) -> list[Step]:
    """Runs the quick start, with a learning rate that keeps the work of each step equal."""
    settings = [f"steps={num_steps}", "optimizer.lr=1e-9", "logging.loggers=[]", "evaluation.num_prompts=1"]
    recipe = load_recipe("quickstart", settings)

    def run() -> None:
        run_folder = RunFolder.create(folder, "quickstart")
        run_folder.write_config(recipe)
        train(recipe, run_folder, resume=False, progress=QuietProgress(), stop=StopSignal(lambda: None))

    return measured(run)


def virtual_clock(num_steps: int, folder: Path) -> list[Step]:
    """Runs the same recipe asynchronously, with the costs of a shipped profile on eight devices."""
    recipe = load_recipe("quickstart", [f"steps={num_steps}", "schedule=areal", "prompts_per_step=64"])
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=8)
    return measured(lambda: simulate(recipe, simulation, timeline=folder / "simulated.json"))


@dataclass
class Result:
    """One arm of one run against `off`."""

    where: str
    arm: str
    num_blocks: int
    ratio: float
    """Median over blocks of CPU time, this arm divided by off."""
    quartiles: tuple[float, float]
    interval: tuple[float, float]
    """95 % interval of the median."""
    wall_ratio: float
    step_ms: float
    """Median CPU time of a step of this arm."""
    inside_share: float
    """Share of the steps' CPU time, timed from inside."""
    spans_a_step: float


def results_of(where: str, steps: list[Step]) -> list[Result]:
    """Returns each arm against `off`."""
    size = len(ARMS)
    blocks = [{step.arm: step for step in steps[start : start + size]} for start in range(0, len(steps), size)]
    found = []
    for arm in ARMS[:-1]:
        ratios = [block[arm].cpu_s / block["off"].cpu_s for block in blocks]
        mine = [block[arm] for block in blocks]
        low, _, high = statistics.quantiles(ratios, n=4)
        found.append(
            Result(
                where=where,
                arm=arm,
                num_blocks=len(blocks),
                ratio=statistics.median(ratios),
                quartiles=(low, high),
                interval=_interval(ratios),
                wall_ratio=statistics.median(block[arm].wall_s / block["off"].wall_s for block in blocks),
                step_ms=1e3 * statistics.median(step.cpu_s for step in mine),
                inside_share=sum(step.inside_s for step in mine) / sum(step.cpu_s for step in mine),
                spans_a_step=statistics.mean(step.num_spans for step in mine),
            )
        )
    return found


def _interval(ratios: list[float]) -> tuple[float, float]:
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(ROUNDS))
    return medians[int(0.025 * ROUNDS)], medians[int(0.975 * ROUNDS)]


def table(results: list[Result]) -> str:
    """Returns a line per arm."""
    lines = [
        f"{'':14}{'against off':14}{'ratio':>8}{'quartiles':>16}{'95 %':>16}{'by clock':>10}"
        f"{'step, ms':>10}{'spans':>7}{'inside':>9}"
    ]
    for each in results:
        quartiles, interval = (f"{low:.3f}-{high:.3f}" for low, high in (each.quartiles, each.interval))
        lines.append(
            f"{each.where:14}{each.arm:14}{each.ratio:>8.3f}{quartiles:>16}{interval:>16}{each.wall_ratio:>10.3f}"
            f"{each.step_ms:>10.1f}{each.spans_a_step:>7.0f}{each.inside_share:>9.2%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the table; --json keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of each run")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    runs = {"quick start": quick_start, "virtual clock": virtual_clock}
    with tempfile.TemporaryDirectory() as folder:
        results = [
            result for where, run in runs.items() for result in results_of(where, run(given.steps, Path(folder)))
        ]
    print(table(results))
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
