"""Scores for the planner: simulates a schedule on the recipe's cluster or on a smaller model of it."""

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult
from statistics import fmean, stdev
from types import FrameType

from interlace.core.errors import HangError, SimulationStoppedError, UserError
from interlace.core.types import TerminalEvent
from interlace.flows.steps import StepResult
from interlace.forecast.costs.scale import scale_model, shorten_episodes, thin_limits, thin_samples
from interlace.forecast.search.bounds import response_lengths
from interlace.forecast.search.candidates import leaves_out, selects_by_speed
from interlace.forecast.search.plans import Fidelity, Refused, SampleEffort, Score, Scorer
from interlace.forecast.simulate import Simulation
from interlace.forecast.virtual import Simulated, no_search_for_cycles, run_virtually
from interlace.observe.goodput import BINS, USEFUL, ledger_of
from interlace.robots.env_stage import simulators_of
from interlace.robots.envs.load import EnvConfig
from interlace.rollouts.config import EpisodeConfig
from interlace.run.recipe.config import Recipe, ScheduleChoice
from interlace.runtime.process.child import become_child
from interlace.runtime.process.launch import spawn_context
from interlace.runtime.timeline import NoRecorder
from interlace.schedule.schedule import Schedule

FIRST_SAMPLE_S = 2.2e-4
"""CPU seconds to simulate a sample, until the search has measured its own rate."""
FEW = 4
"""Simulations per process up to which all of them are expected to end in time."""
REPORT_EVERY_S = 3.0
"""Seconds between two lines of progress."""
AGAIN_S = 1.0
"""Seconds within which a second Ctrl-C belongs to the first."""
ENDING_CPU_S = 0.3
"""CPU seconds from the last check of the time until the plan is written: the interrupted simulation is freed, the plans
are compared, table and page are written."""
LEAST_SHARE = 0.25
"""Share of the time that a search gets even if the work before it took longer than the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workplace:
    """Recipe and cluster that schedules are scored for."""

    recipe: Recipe
    simulation: Simulation

    def score(self, schedule: Schedule, fidelity: Fidelity, *, stop_at_s: float = math.inf) -> Score | Refused | None:
        """Predicts a schedule. If it cannot run, returns the reason.

        stop_at_s: time.monotonic() value at which the simulation stops and returns None.
        """
        counted = fidelity.count_steps(schedule)
        steps, prompts = fidelity.num_steps(schedule), self.recipe.prompts_per_step // (fidelity.scale * fidelity.thin)
        granule = schedule.granularity.of("reward")
        schedule = thin_limits(schedule, fidelity.thin)
        recipe = self.recipe.model_copy(
            update={
                "episode": with_fewer_envs(self.recipe.episode, fidelity.scale),
                "schedule": ScheduleChoice(preset="a plan's", resolved=schedule),
                "prompts_per_step": prompts,
                "minibatches": self.recipe.minibatches if prompts % self.recipe.minibatches == 0 else 1,
                # More steps than are simulated: close to the end of a run the gate admits nothing ahead.
                "steps": 4 * steps + 16,
            }
        )
        simulation = self.simulation
        scaled = scale_model(simulation.profile, fidelity.scale, simulation.num_devices, schedule)
        here = replace(
            simulation,
            profile=thin_samples(shorten_episodes(scaled, fidelity.turns), fidelity.thin, granule),
            num_devices=simulation.num_devices // fidelity.scale,
            pools=tuple((pool, count // fidelity.scale) for pool, count in simulation.pools),
        )
        is_slow = _SlowRun(fidelity.most_step_s, schedule.steps_ahead)
        with no_search_for_cycles():  # memory is freed before the collector is enabled again
            try:
                run = run_virtually(
                    recipe,
                    here,
                    name="plan",
                    recorder=NoRecorder,
                    on_step=lambda result: result.step < steps and not is_slow.observe(result),
                    stop_at_s=stop_at_s,
                )
            except SimulationStoppedError:
                return None
            except (UserError, HangError) as error:
                return Refused(reason=str(error))
            score = score_of(run, counted, here, recipe)
            del run
        # The model has a share of the devices and of the samples, and of a robot's episode a share of the turns.
        left_out = simulation.num_devices / here.num_devices * _count_turns(simulation) / _count_turns(here)
        left_out *= fidelity.thin
        return replace(score, tokens_per_s=score.tokens_per_s * left_out)


class _SlowRun:
    """Detector of a simulated run that takes longer than a limit allows.

    The first steps may take the time of those that the pipeline holds, too.
    """

    def __init__(self, most_step_s: float, steps_ahead: float) -> None:
        self._most_step_s, self._steps_ahead, self._seconds = most_step_s, steps_ahead, 0.0

    def observe(self, result: StepResult) -> bool:
        """Records a step. Returns whether the run takes too long."""
        self._seconds += result.metrics["timing_s/step"]
        return self._seconds > self._most_step_s * (result.step + self._steps_ahead)


def _count_turns(simulation: Simulation) -> float:
    """Returns the mean number of turns of a simulated episode, which has at least one; 1 without a turn model."""
    turns = simulation.profile.turns
    return fmean(max(1, round(count)) for count in turns.turns) if turns else 1.0


def with_fewer_envs(episode: EpisodeConfig, scale: int) -> EpisodeConfig:
    """Returns the episode with its environments divided by `scale`, for a model of the cluster."""
    env = getattr(episode, "env", None)
    if scale == 1 or not isinstance(env, EnvConfig):
        return episode
    fewer = env.model_copy(update={"num_envs": max(1, env.num_envs // scale)})
    others = {name: with_fewer_envs(each, scale) for name, each in episode.others.items()}
    return episode.model_copy(update={"env": fewer, "others": others})


def score_of(run: Simulated, counted: int, simulation: Simulation, recipe: Recipe) -> Score:
    """Returns the means over the last `counted` steps. simulation: of the run; its tokens/s are of all its devices."""
    counted = min(counted, len(run.results))
    filling, results = run.results[:-counted], run.results[-counted:]
    rows = [result.metrics for result in results]
    step_s = [row["timing_s/step"] for row in rows]
    seconds = sum(step_s)
    per_device = sum(row["goodput/trained_tokens_per_device_s"] * row["timing_s/step"] for row in rows) / seconds
    ledger = ledger_of(rows)
    filled_s = sum(result.metrics["timing_s/step"] for result in filling)
    shift = 0.0
    if selects_by_speed(recipe.schedule.resolved):
        shift = _length_shift(results, simulation, recipe)
    return Score(
        step_s=seconds / counted,
        error_s=stdev(step_s) / math.sqrt(counted) if counted > 1 else 0.0,
        tokens_per_s=per_device * simulation.num_devices,
        goodput=sum(ledger.fraction(name) for name in USEFUL),
        staleness_mean=fmean(row["sched/staleness_mean"] for row in rows),
        staleness_max=max(row["sched/staleness_max"] for row in rows),
        length_shift=shift,
        bins={name: ledger.fraction(name) for name in BINS},
        num_steps=len(run.results),
        fill_s=max(0.0, filled_s - len(filling) * seconds / counted),
    )


def _length_shift(results: Sequence[StepResult], simulation: Simulation, recipe: Recipe) -> float:
    """Returns the mean trained length divided by the profile's mean, minus 1.

    If every sample is trained on and speed changes only the order, a shift within two standard errors over groups
    counts as 0. If no sample was trained, the shift is 0.
    """
    groups: dict[int, list[int]] = {}
    for ended in (ended for result in results for ended in result.ended if ended.event == TerminalEvent.TRAINED):
        groups.setdefault(ended.sample.key.gid, []).append(ended.sample.num_tokens)
    if not groups:
        return 0.0
    means = [fmean(lengths) for lengths in groups.values()]
    expected = fmean(response_lengths(simulation.profile.lengths, recipe.sampling.max_new_tokens))
    if simulation.profile.turns and not recipe.episode.is_single_turn:
        turns = simulation.profile.turns
        count = fmean(turns.turns)
        # A sample counts what it is given too: before each turn of a robot, between the turns of an agent.
        given = count if simulators_of(recipe.episode) else count - 1
        expected = expected * count + given * fmean(turns.given_tokens)
    trained = fmean(length for lengths in groups.values() for length in lengths)
    chance = 2 * stdev(means) / math.sqrt(len(means)) / expected if len(means) > 1 else math.inf
    shift = trained / expected - 1
    return shift if leaves_out(recipe.schedule.resolved) or abs(shift) > chance else 0.0


class TimedEffort(SampleEffort):
    """Search effort in seconds of real time, shared by the search and its processes."""

    def __init__(
        self,
        search_s: float,
        *,
        processes: int,
        num_samples: int | None = None,
        say: Callable[[str], None] = lambda _text: None,
        began_s: float | None = None,
    ) -> None:
        """processes: number of parallel simulations. num_samples: limit of simulated samples in addition to the time;
        if this limit ends the search, the plan does not depend on the machine. say: prints a line of progress. began_s:
        time.monotonic() value at which this process started, if its start counts; the search gets the rest of the time.
        """
        super().__init__(num_samples)
        self._start_s = self._reported_s = now_s = time.monotonic()
        self._began_s = now_s if began_s is None else began_s
        self._limit_s, self._say = search_s, say
        self._search_s = max(self._began_s + search_s - now_s, LEAST_SHARE * search_s)
        # Other processes slow this one down: real seconds, and the CPU seconds that it got in them.
        self._real_s, self._cpu_s = (1.0, 1.0) if began_s is None else (now_s - began_s, time.process_time())
        self._sample_s = FIRST_SAMPLE_S / processes
        self.is_stopped = False
        """True after Ctrl-C."""

    @property
    def stop_at_s(self) -> float:
        """time.monotonic() value at which the search ends."""
        if self.is_stopped:
            return -math.inf
        slowdown = max(1.0, self._real_s / self._cpu_s)
        return self._start_s + self._search_s - min(ENDING_CPU_S * slowdown, self._search_s / 2)

    def observe_speed(self, real_s: float, cpu_s: float) -> None:
        """Records the real and the CPU seconds of a simulation in this process."""
        self._real_s += real_s
        self._cpu_s += cpu_s

    def stop(self) -> None:
        """Ends the search with the best plan so far."""
        self.is_stopped = True

    @property
    def share_left(self) -> float:
        """Remaining share of the time or of the samples: the smaller one."""
        return min(max(0.0, (self.stop_at_s - time.monotonic()) / self._search_s), super().share_left)

    def spend(self, num_samples: int) -> None:
        """Records simulated samples and updates the measured rate."""
        super().spend(num_samples)
        elapsed_s = time.monotonic() - self._start_s
        if self._num_spent and elapsed_s > 0:
            self._sample_s = elapsed_s / self._num_spent

    def affords(self, num_samples: int) -> bool:
        return super().affords(num_samples) and num_samples * self._sample_s <= self.stop_at_s - time.monotonic()

    def report(self, text: str) -> None:
        """Prints a line of progress, at most once in REPORT_EVERY_S."""
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            self._say(f"planning, {now_s - self._began_s:.0f} of {self._limit_s:g} s: {text}")


_workplace: Workplace


def _begin_worker(workplace: Workplace) -> None:
    global _workplace  # noqa: PLW0603 - all tasks of a pool's process share it
    _workplace = workplace
    become_child()


def _score(task: tuple[Schedule, Fidelity, float]) -> Score | Refused | None:
    schedule, fidelity, stop_at_s = task
    return _workplace.score(schedule, fidelity, stop_at_s=stop_at_s)


@contextmanager
def open_scorer(workplace: Workplace, *, processes: int, effort: TimedEffort) -> Iterator[Scorer]:
    """Opens a scorer that simulates in separate processes, or in this process if `processes` is 1.

    It returns None for every schedule that did not fit into the time of `effort`. Ctrl-C ends the search, and a second
    one the program.
    """
    # Spawned, not forked, because a run that plans has threads. This process simulates too, also while the others
    # start.
    pool = spawn_context().Pool(processes - 1, _begin_worker, (workplace,)) if processes > 1 else None
    room = 2 * (processes - 1)

    def score(tasks: Sequence[tuple[Schedule, Fidelity]]) -> Sequence[Score | Refused | None]:
        found: list[Score | Refused | None] = [None] * len(tasks)
        order: Sequence[int] = range(len(tasks))
        if len(tasks) <= FEW * processes:
            # Start the longest simulations first: a long one at the end would run alone. Of many, the time may allow
            # only some: these run in the order given, the most promising first.
            order = sorted(order, key=lambda place: -tasks[place][1].num_steps(tasks[place][0]))
        waiting = deque(order)
        running: dict[int, AsyncResult[Score | Refused | None]] = {}
        try:
            interrupt.raises = True
            while (waiting or running) and time.monotonic() < effort.stop_at_s:
                while pool and waiting and len(running) < room:
                    place = waiting.popleft()
                    running[place] = pool.apply_async(_score, ((*tasks[place], effort.stop_at_s),))
                if waiting:
                    place = waiting.popleft()
                    start_s, start_cpu_s = time.monotonic(), time.thread_time()
                    found[place] = workplace.score(*tasks[place], stop_at_s=effort.stop_at_s)
                    effort.observe_speed(time.monotonic() - start_s, time.thread_time() - start_cpu_s)
                else:
                    # Running simulations check the time themselves, except while their workers start.
                    next(iter(running.values())).wait(max(0.0, effort.stop_at_s - time.monotonic()))
                for place in [place for place, result in running.items() if result.ready()]:
                    found[place] = running.pop(place).get()
                num_left = len(waiting) + len(running)
                effort.report(f"{len(tasks) - num_left} of {len(tasks)} schedules of this round simulated")
        except KeyboardInterrupt:
            effort.stop()
        finally:
            interrupt.raises = False
        return found

    interrupt = _Interrupt(effort)
    try:
        with interrupt:
            yield score
    finally:
        if pool:
            pool.terminate()
            pool.join()


class _Interrupt:
    """Ctrl-C during a search: ends it. Between simulations it only stops the effort, so that the plans remain.

    A second Ctrl-C within AGAIN_S has no effect, because the plans so far are then being ranked; a later one ends the
    program.
    """

    def __init__(self, effort: TimedEffort) -> None:
        self._effort = effort
        self._stopped_s: float | None = None
        """Time of the first Ctrl-C."""
        self.raises = False
        """True while a KeyboardInterrupt ends a simulation, and nothing else."""

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._is_set = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_set:  # not in the processes of a run, which ignore Ctrl-C
            signal.signal(signal.SIGINT, self._on_signal)

    def __exit__(self, *_: object) -> None:
        if self._stopped_s is not None:
            time.sleep(max(0.0, self._stopped_s + AGAIN_S - time.monotonic()))
        if self._is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._stopped_s is not None:
            if now_s - self._stopped_s < AGAIN_S:
                return
            raise KeyboardInterrupt
        self._stopped_s = now_s
        self._effort.stop()
        if self.raises:
            raise KeyboardInterrupt
