"""Every benchmark runs at its smallest size, because the documents name benchmarks as sources of figures."""

import dataclasses
import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.forecast.plan import PlanRequest
from interlace.forecast.scoring import FIRST_SAMPLE_S

FOLDER = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 280
ON_RAY = pytest.mark.ray
SMALLEST = {
    "absolute": (),
    "advice": ("--recipes", "quickstart", "--steps", "6", "--rounds", "1"),
    "agent_recipes": (
        "--recipes",
        "react",
        "--seeds",
        "0",
        "--runs",
        "runs",
        "--set",
        "steps=1",
        "warmup.steps=2",
        "warmup.until=null",
    ),
    "agents": ("--only", "crowd", "--rounds", "1"),
    "channel": ("--lengths", "64", "--batches", "64"),
    "control": ("--task", "cartpole", "hopper-sac", "reach-sac", "--seeds", "0", "--steps", "300"),
    "checkpoint": ("--hidden", "32", "--layers", "1", "--rounds", "1"),
    "data_plane": ("--samples", "64", "--rounds", "1"),
    "drift": ("--parts", "device", "--steps", "8", "--schedules", "verl-colocated"),
    "eight_bits": ("--model", "tiny:micro", "--sequences", "4", "--tokens", "4", "--rounds", "1"),
    "embodied": ("--only", "swap", "fleet", "pictures", "--rounds", "1", "--chunks", "1"),
    "embodied_loop": ("--only", "batches", "loop", "--rounds", "1", "--steps", "1"),
    "embodied_placements": ("--devices", "8", "--presets", "rlinf-embodied-collocated"),
    "engines": ("--model", "tiny:micro", "--requests", "4", "--tokens", "4", "--rounds", "1"),
    "end_to_end": ("--case", "one-core", "--lengths", "uniform", "--rounds", "1"),
    "far_engine": ("--steps", "2"),
    "gpu_decode": ("--device", "cpu", "--hidden", "512", "--layers", "1", "--shapes", "1"),
    "hosts": ("--steps", "4", "--rounds", "1"),
    "planner": ("--clusters", "local", "--workloads", "quickstart", "--schedules", "one-step-off", "--steps", "1"),
    "published": ("presets", "--devices", "16", "--steps", "1", "--presets", "areal,rollpacker"),
    "recipe_curves": (
        *("--recipes", "sft", "--seeds", "0", "--runs", "runs"),
        *("--set", "steps=2", "eval_every=1", "task.reasoning_gym.heldout_size=4"),
    ),
    "recipe_seeds": ("--recipes", "quickstart", "--seeds", "0", "--read-only"),
    "records": ("--schedules", "one-step-off", "--steps", "6"),
    "robot_edge": ("--heads", "gaussian", "--delays", "5", "--episodes", "1", "--warmup-steps", "2"),
    "rollout": ("--median", "8", "--rounds", "1", "--rows", "4"),
    "scale": ("--sizes", "16:200"),
    "server": (),
    "simulate": ("--presets", "areal", "--devices", "16", "--steps", "1", "--rounds", "1"),
    "timeline": ("--steps", "15"),
    "compare_trl": ("--steps", "2", "--start-steps", "2", "--seeds", "0"),
    "watch": ("--steps", "24", "--period", "2"),
    "weights": ("--scale", "0.01", "--rounds", "2"),
    "train_step": ("--rounds", "1", "--case", "all"),
    "world_model": ("--seeds", "0", "--steps", "2"),
}


def test_all_are_there() -> None:
    assert {path.stem for path in FOLDER.glob("[a-z]*.py")} == set(SMALLEST)


def test_a_benchmark_finds_the_tests_package_from_each_folder() -> None:
    """A program that imports it without its path runs only if PYTHONPATH is set."""
    for path in FOLDER.glob("*.py"):
        before, found, _ = path.read_text(encoding="utf-8").partition("\nfrom tests.")
        assert not found or "sys.path.insert(0, str(Path(__file__).parents[1]))" in before, path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_RAY if name == "channel" else ()) for name in SMALLEST])
def test_a_benchmark_runs_and_writes_what_it_measured(name: str, tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), *SMALLEST[name], "--json", str(written)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(written.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("part", ["lengths", "tool"])
def test_each_part_of_the_drift_runs(part: str, tmp_path: Path) -> None:
    """The part `device` runs with the other benchmarks."""
    written = tmp_path / "figures.json"
    words = ["--parts", part, "--steps", "8", "--schedules", "one-step-off", "--json", str(written)]
    subprocess.run([sys.executable, str(FOLDER / "drift.py"), *words], cwd=tmp_path, timeout=TIMEOUT_S, check=True)
    assert [(row["part"], row["name"]) for row in json.loads(written.read_text())] == [
        (part, "auto"),
        (part, "one-step-off"),
    ]


def test_the_drift_compares_schedules_by_phases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    drift = importlib.import_module("drift")
    runs = [
        drift.Ran(name=name, tokens=(30.0, 40.0), rates=rates, rate=rate, wall_s=50.0, num_changes=changes)
        for name, rates, rate, changes in (
            ("auto", (90.0, 60.0), 72.0, 1),
            ("areal", (100.0, 40.0), 57.0, 0),
            ("verl-colocated", (80.0, 50.0), 61.0, 0),
        )
    ]
    text = drift.summarize({"tool": (runs[0], runs[1:])})
    assert "| the tool takes 4x | before | `areal` | 100 | 0.90 |" in text
    assert "| the tool takes 4x | after | `verl-colocated` | 50 | 1.20 |" in text
    assert "1.18 times as many as the best static schedule" in text.replace("\n", " ")
    monkeypatch.setattr(sys, "argv", ["drift.py", "--parts", "tool", "--write"])
    with pytest.raises(SystemExit):
        drift.main()
    assert "--write needs all parts" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["drift.py", "--steps", "3"])
    with pytest.raises(SystemExit):
        drift.main()
    assert "--steps 3: a run has 4 phases" in capsys.readouterr().err


def test_an_interrupted_drift_ends_its_run_before_it_removes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    drift = importlib.import_module("drift")
    begun: list[int] = []

    def interrupt(process: int, _folder: Path) -> None:
        begun.append(process)
        raise KeyboardInterrupt

    code = "import time; print('step 4/8', flush=True); time.sleep(60)"
    part = drift.Part(title="", phases=("before", "after"), settings=(), code=code, change=interrupt)
    with pytest.raises(KeyboardInterrupt):
        drift.ran(part, "run", "areal", 8, tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(begun[0], 0)


@pytest.mark.slow
def test_the_controller_is_measured_with_ranks_behind_sockets(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    command = [sys.executable, str(FOLDER / "scale.py"), "--ranks", "4", "--json", str(written)]
    subprocess.run(command, cwd=tmp_path, timeout=TIMEOUT_S, check=True)
    (row,) = json.loads(written.read_text())
    assert row["samples"] > 4 * 25


def test_control_counts_the_cpu_time_of_living_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator is a child of the fork server, and both live until the run's process ends."""
    monkeypatch.syspath_prepend(str(FOLDER))
    control = importlib.import_module("control")
    work = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    before = control._cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"done\n"
        assert control._cpu_seconds() - before > 0.45
        child.communicate(b"\n")


def test_control_gives_stable_baselines3_the_simulator_of_interlace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    tasks = importlib.import_module("_control_tasks")
    assert f"task.starts.train_size={tasks.NUM_STARTS}" in tasks.TASKS["reach-sac"].overrides
    section = {"family": "gymnasium", "settings": {"tasks": ["Pendulum-v1"], "horizon": 3}}
    one, other = tasks.SimulatorEnv(section, 0.1), tasks.SimulatorEnv(section, 1.0)
    (first, _), (second, _) = one.reset(seed=5), other.reset(seed=5)
    assert one.observation_space.contains(first) and (first == second).all() and not (first == one.reset()[0]).all()
    one.reset(seed=5)
    ends = [(one.step(one.action_space.low), other.step(one.action_space.low)) for _ in range(3)]
    assert [found[2:4] for found, _ in ends] == [(False, False), (False, False), (False, True)]
    assert all(found[1] == pytest.approx(0.1 * whole[1]) and whole[1] < 0 for found, whole in ends)


def test_the_planner_has_twelve_workloads_and_writes_predictions_under_their_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    planner, points = importlib.import_module("planner"), importlib.import_module("_planner_points")
    plans, probe = (importlib.import_module(f"interlace.forecast.{name}") for name in ("search.plans", "profile.probe"))
    assert len(set(planner.POINTS)) == 12
    for cluster, workload in planner.POINTS:
        assert points.recipe_of(workload, cluster, 2).cluster.backend == cluster
    store = points.Store(tmp_path / "store.json")
    score = plans.Score(
        step_s=2.0, error_s=0.1, tokens_per_s=10.0, goodput=0.5, staleness_mean=0.0, staleness_max=0.0, length_shift=0.0
    )
    start = store.predict(("quickstart", "local", "areal"), score)
    ((key, text),) = json.loads((tmp_path / "store.json").read_text())["predictions"].items()
    assert key == hashlib.sha256(text.encode()).hexdigest() and key.startswith(start)
    assert json.loads(text)["score"]["step_s"] == 2.0
    slow, fast = probe.Speed(step_s=2.0, tokens_per_s=10.0), probe.Speed(step_s=1.0, tokens_per_s=20.0)
    store.points.append(
        points.Point(
            workload="quickstart", cluster="local", schedule="areal", prediction=start, predicted=fast,
            predicted_reference=slow,
            measured=probe.ProbeComparison(speed=fast, before=slow, after=slow),
        )
    )  # fmt: skip
    store.save()
    kept = points.Store(tmp_path / "store.json")
    assert kept.points == store.points
    assert kept.points[0].error == 0.0
    assert "| quickstart | 2 |" in points.summarize(kept)


def test_the_searches_of_the_planners_tables_can_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    timed, mixed = importlib.import_module("_planner_time"), importlib.import_module("_planner_mixed")
    for case in timed.CASES:
        assert case.request(case.short_s, is_timed=True).simulation.num_devices == case.devices
    for devices, profile in mixed.CLUSTERS:
        assert mixed.make_request(devices, profile, 1).recipe.prompts_per_step == 128


def test_a_simulated_drift_counts_the_cost_of_each_kind_of_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change cost a restart and an empty pipeline, also changes that a run makes in place."""
    monkeypatch.syspath_prepend(str(FOLDER))
    drift = importlib.import_module("_planner_drift")
    load_schedule = importlib.import_module("interlace.schedule.presets").load_schedule
    sizes = drift.Sizes(devices=16, prompts=16, num_lost=4, scale=2, steps=6, simulated=2)
    phases = drift.make_phases(sizes)
    start, last = phases[0], phases[-1]
    ahead = drift._bounded(load_schedule("pipelinerl"))
    behind, shared = ahead.model_copy(update={"pipeline_depth": 1.0}), load_schedule("verl-colocated")
    assert start.may_become(behind, ahead) and not start.may_become(ahead, shared)
    seconds = {
        before: sum(map(drift.seconds_of, start.simulate(ahead, before).steps(sizes.steps, fills=True)))
        for before in (behind, None)
    }
    assert seconds[behind] < seconds[None], "the pipeline is not filled from the beginning"
    continued, starts_again = last.take_over(ahead, phases[-2])
    assert not starts_again and continued.placement.of("rollout").devices == "0-3", "four of eight engines are left"
    assert last.take_over(shared, phases[-2]) == (
        drift.fit_schedule(shared, start.request.simulation.devices, 12),
        True,
    )
    row = drift.run_static(phases, shared)
    steady_s = sizes.steps * last.simulate(last.take_over(shared, phases[-2])[0]).step_s
    assert row.seconds[-1] == pytest.approx(steady_s + sizes.switch_s), "a trainer's device is lost"


def test_a_search_takes_its_time_on_the_virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a search was followed at the next step, although the search takes several."""
    monkeypatch.syspath_prepend(str(FOLDER))
    drift = importlib.import_module("_planner_drift")
    phase = drift.make_phases(drift.Sizes(devices=16, prompts=16, num_lost=4, scale=2))[0]
    settings = phase.request.settings.model_copy(update={"search_s": 30.0})
    request = dataclasses.replace(phase.request, settings=settings)
    clock, plans = drift.Clock(now_s=100.0), []
    process = drift.VirtualProcess(clock, 2.0)

    def search(request: PlanRequest) -> None:
        plans.append(request.settings)

    first, second = (process.apply_async(search, (request,)) for _ in "ab")
    assert plans[0].search_samples == round(30 / FIRST_SAMPLE_S)
    found = []
    for clock.now_s in (131.0, 132.0, 161.0, 162.0):
        found.append((first.ready(), second.ready()))
    assert found == [(False, False), (True, False), (True, False), (True, True)]


def test_presets_of_another_size_are_not_written_into_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page then compared presets on 16 devices with those on 256."""
    monkeypatch.syspath_prepend(str(FOLDER))
    published = importlib.import_module("published")
    monkeypatch.setattr(sys, "argv", ["published.py", "presets", "--devices", "16", "--presets", "", "--write"])
    monkeypatch.setattr(published, "presets", lambda *_: {})
    with pytest.raises(SystemExit):
        published.main()
    assert "docs/schedules.md compares presets on 256 devices" in capsys.readouterr().err


def test_the_pictures_of_curves_are_small_and_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    drawn = importlib.import_module("recipe_curves")
    for seed in range(3):
        folder = tmp_path / f"runs/smollm2-{seed}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("steps: 9\n")
        rows = [{"step": step, "reward/mean": step / 10 + seed / 100} for step in range(1, 10 if seed else 9)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert drawn.read_curve("smollm2", 0, tmp_path) == {}, "the run is not complete"
    curve = drawn.read_curve("smollm2", 1, tmp_path)
    assert list(curve) == [5, 6, 7, 8, 9] and curve[5] == pytest.approx(0.31), "a mean of five steps"
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {drawn.NAME} -->\n\n<!-- /{drawn.NAME} -->\n")
    drawn.write_page(page, {"smollm2": {1: curve, 2: curve}, "dpo": {seed: {0: 0.0, 4: 1.0} for seed in range(3)}})
    text = "dpo: held-out pairs in order, by step, seeds 0, 1, 2; 0.00 at the first step, 1.00 at the last"
    short = "dpo: held-out pairs in order, 0.00, then 1.00"
    assert page.read_text().splitlines()[2] == f"![{short}](images/curves/dpo.svg)"
    picture = (tmp_path / "images/curves/dpo.svg").read_text()
    assert len(picture) < 5000 and picture.count('class="curve"') == 3 and f'aria-label="{text}"' in picture


def test_every_picture_of_the_gallery_is_small_and_has_a_text() -> None:
    page = (FOLDER.parent / "docs" / "gallery.md").read_text(encoding="utf-8")
    pictures = sorted((FOLDER.parent / "docs/images/curves").glob("*.svg"))
    assert len(pictures) >= 12
    for picture in pictures:
        assert picture.stat().st_size < 5000 and f"](images/curves/{picture.name})" in page
