"""A real run with schedule=auto changes its schedule at a publication and continues as one run."""

import json
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from interlace.core.types import Metrics
from interlace.flows.steps import StepResult
from interlace.forecast import online
from interlace.forecast.online import OnlinePlanner
from interlace.forecast.plan import PlanRequest, PlanSettings
from interlace.forecast.profile.types import Lengths, Profile, RolloutCosts, TrainCosts
from interlace.forecast.recipe_check import AcceptsHere
from interlace.forecast.simulate import Simulation
from interlace.observe.progress import ProgressView, QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.callbacks import Callbacks
from interlace.run.recipe.config import AUTO, Recipe, set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from tests.support.training import SMALL, metrics, run, samples

STEPS = 160
ONE_THREAD = "cluster.threads_per_worker=1"
"""Sums are equal under every placement with one thread only: more threads add up in another order."""
STARTED_WITH = "rlinf-disaggregated"
WRONG = Profile(
    device="one whose trainer takes no time and whose decoding takes long",
    device_memory_bytes=2**34,
    rollout=RolloutCosts(
        steps=((1, 0.05), (4, 0.2), (16, 0.8)),
        context_token_s=0.0,
        call_s=0.0,
        prefill_token_s=0.0,
        kv_tokens=8192,
        kv_token_s=0.0,
        max_running=16,
        update_s=0.0,
        state_bytes=2**20,
        device_bytes=0,
        onload_s=0.0,
        offload_s=0.0,
    ),
    actor=TrainCosts(
        token_s=1e-6,
        inference_token_s=1e-6,
        optimizer_s=0.0,
        export_s=0.0,
        state_bytes=2**20,
        working_bytes=0,
        onload_s=0.0,
        offload_s=0.0,
    ),
    lengths=Lengths(median=8),
)
"""Says that all devices should generate. What it says of this machine is wrong; which schedule is faster here is not
asked."""


class Patient(OnlinePlanner):
    """Planner that waits for its searches and ignores the cost of a restart, so that no decision depends on the speed
    of the machine.
    """

    def started(self, seconds: float, may_become: Callable[[Schedule], bool] = lambda _: False) -> None:
        del seconds
        super().started(0.0, may_become)
        self._rule.switch_s = 0.0

    def on_step(self, result: StepResult, progress: ProgressView) -> Metrics:
        found = super().on_step(result, progress)
        self.wait()
        return found


class Heard(QuietProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def changed_run(root: Path, name: str, changes: Sequence[str] = ()) -> tuple[Recipe, Heard]:
    """Trains with a planner that has a reason to leave the schedule it begins with. Returns the recipe begun with."""
    asked = [*SMALL, f"steps={STEPS}", "keep_checkpoints=9", f"model.cache_dir={root / 'cache'}", *changes]
    begun = load_recipe("quickstart", asked)
    schedule = load_schedule(STARTED_WITH)
    simulation = Simulation(profile=WRONG, num_devices=2, num_prompts=64)
    request = PlanRequest(
        recipe=begun,
        simulation=simulation,
        settings=PlanSettings(search_s=600, search_samples=4_000, search_processes=1),
        spans=(1,),
    )
    planner = Patient(request, schedule, 0.5, AcceptsHere(begun, simulation.devices, 16))
    folder, heard = RunFolder.create(root, name), Heard()
    recipe = set_schedule(begun, schedule, AUTO)
    folder.write_config(recipe)
    report = train(recipe, folder, resume=False, progress=heard, stop=StopSignal(lambda: None), planner=planner)
    planner.close()
    assert report.done_steps == STEPS and not report.was_stopped
    return recipe, heard


@pytest.mark.slow
def test_a_run_whose_schedule_is_changed_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "SEARCH_S", 600.0)  # the number of simulated samples ends a search
    monkeypatch.setattr(online, "REST_PER_SEARCH", 0.0)
    recipe, heard = changed_run(tmp_path, "changed", [ONE_THREAD])
    changes = [line for line in heard.lines if line.startswith("changing the schedule:")]
    resumed = [line for line in heard.lines if line.startswith("resuming after step")]
    assert len(changes) == len(resumed) >= 1, heard.lines
    ended_with = load_recipe(str(tmp_path / "changed" / "config.yaml")).schedule.resolved
    assert ended_with != recipe.schedule.resolved

    rows = [json.loads(line) for line in (tmp_path / "changed" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "no step is left out or logged twice"
    assert all(later["version"] >= row["version"] for row, later in pairwise(rows)), [row["version"] for row in rows]
    assert all({"plan/predicted_s", "plan/error"} <= row.keys() for row in rows)

    # Both schedules are synchronous: the same prompts, samples and updates under every placement. They train in parts
    # of different sizes, so samples are packed differently and sums are rounded differently.
    run(tmp_path, "unchanged", [f"steps={STEPS}", f"schedule={STARTED_WITH}", ONE_THREAD])
    trained, expected = samples(tmp_path, "changed"), samples(tmp_path, "unchanged")
    assert trained == expected
    mine = [{key: value for key, value in row.items() if not key.startswith("plan/")}
            for row in metrics(tmp_path, "changed")]  # fmt: skip
    assert mine == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in metrics(tmp_path, "unchanged")]


class Fixed:
    """Planner that asks for one schedule after step 2."""

    def __init__(self, schedule: Schedule, wanted: Schedule) -> None:
        self.schedule, self._wanted = schedule, wanted
        self.change: Schedule | None = None

    def started(self, seconds: float, may_become: Callable[[Schedule], bool]) -> None:
        assert seconds > 0 and may_become(self._wanted)

    def on_step(self, result: StepResult, progress: ProgressView) -> Metrics:
        self.change = self._wanted if result.step == 2 else None
        return {}

    def take_change(self) -> Schedule | None:
        taken, self.change = self.change, None
        self.schedule = taken or self.schedule
        return taken

    def fit_devices(self, num_devices: int) -> Schedule:
        raise AssertionError(f"the run started again on {num_devices} devices")

    def follow_devices(self, remaining: Collection[int], running: Schedule) -> None:
        raise AssertionError(f"devices disappeared, except {remaining}, under {running}")


class Restarting(Fixed):
    """Such a planner, for a schedule that needs a restart."""

    def started(self, seconds: float, may_become: Callable[[Schedule], bool]) -> None:
        assert not may_become(self._wanted)


def test_a_run_that_a_callback_stops_does_not_start_again_for_a_change(tmp_path: Path) -> None:
    asked = [*SMALL, "steps=4", f"model.cache_dir={tmp_path / 'cache'}", ONE_THREAD]
    schedule = load_schedule(STARTED_WITH)
    planner, heard = Restarting(schedule, Schedule.parse({**schedule.model_dump(), "min_hold": 1.0})), Heard()
    recipe, folder = set_schedule(load_recipe("quickstart", asked), schedule, AUTO), RunFolder.create(tmp_path, "run")
    folder.write_config(recipe)
    callbacks, stop = Callbacks([lambda step: step.stop() if step.step == 2 else None]), StopSignal(lambda: None)
    report = train(recipe, folder, resume=False, progress=heard, stop=stop, planner=planner, callbacks=callbacks)
    assert report.done_steps == 2 and report.after is not None
    assert not [line for line in heard.lines if line.startswith("resuming")]


def test_a_real_run_changes_its_schedule_in_place(tmp_path: Path) -> None:
    asked = [*SMALL, "steps=4", f"model.cache_dir={tmp_path / 'cache'}", ONE_THREAD]
    begun = load_recipe("quickstart", asked)
    schedule = load_schedule(STARTED_WITH)
    wanted = Schedule.parse({**schedule.model_dump(), "dispatch": "longest_first", "concurrency": 3})
    recipe, planner, heard = set_schedule(begun, schedule, AUTO), Fixed(schedule, wanted), Heard()
    folder = RunFolder.create(tmp_path, "changed")
    folder.write_config(recipe)
    report = train(recipe, folder, resume=False, progress=heard, stop=StopSignal(lambda: None), planner=planner)
    assert report.done_steps == 4
    assert "the schedule changed without a restart" in heard.lines
    assert not [line for line in heard.lines if line.startswith("resuming")]
    assert load_recipe(str(folder.config)).schedule.resolved == wanted
    run(tmp_path, "unchanged", ["steps=4", f"schedule={STARTED_WITH}", ONE_THREAD])
    assert samples(tmp_path, "changed") == samples(tmp_path, "unchanged"), "dispatch changes no token"
