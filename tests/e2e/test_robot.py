"""Complete runs of a robot at toy size use the same flow, schedules, resume and evaluation as text."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from interlace.cli.eval import make_evaluated_recipe
from interlace.core.errors import InterlaceError, UserError
from interlace.models.loading import load_tokenizer
from interlace.observe.films import read_films
from interlace.observe.progress import QuietProgress
from interlace.observe.report.page import write_report
from interlace.observe.run_folder import RunFolder
from interlace.run.evaluator import evaluate_model
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import recipe_prompts
from tests.support.robots import DOT, SMALL, run
from tests.support.training import equal_weights, final_weights, metrics, run_recipe, samples

pytest.importorskip("gymnasium")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("robots")
    report = run(root, "whole")
    assert report.before is not None and report.before.num_prompts == 3
    return root


def test_a_run_says_what_its_episodes_did(whole: Path) -> None:
    for line in metrics(whole, "whole"):
        assert line["samples/trained"] == 4
        assert 8 <= line["env/episode_length"] <= 40
        assert line["env/return"] == pytest.approx(line["env/episode_length"] * 0.01, rel=1e-4)
        assert line["reward/mean"] == pytest.approx(line["env/return"], rel=1e-4)
        assert line["env/steps"] == line["env/actions"] >= line["env/resets"] >= 4
        assert line["sched/mixed_versions"] == 0
    assert any("env/steps_per_second" in key for key in metrics(whole, "whole")[0])


@pytest.mark.parametrize(
    "overrides",
    [
        ("episode.env.workers=2", "episode.env.num_envs=3"),
        ("schedule.preset=rlinf-hybrid",),
        ("schedule.preset=rlinf-collocated", "schedule.placement.rollout=50-100%"),
        ("schedule.preset=rlinf-disaggregated",),
        ("schedule.preset=verl-colocated", "schedule.granularity=2"),
        ("schedule.placement.env=0-50%", "schedule.granularity.env=50%", "episode.env.num_envs=4"),
        ("episode.workers=2", "schedule.granularity.env=2"),
    ],
    ids=["workers", "hybrid", "collocated", "disaggregated", "half-batches", "simulators on a device", "elsewhere"],
)
def test_neither_processes_nor_placement_nor_granules_change_an_episode_or_a_weight(
    whole: Path, overrides: Sequence[str]
) -> None:
    name = "".join(letter for letter in "-".join(overrides) if letter.isalnum())[:40]
    run(whole, name, overrides)
    assert samples(whole, name) == samples(whole, "whole")
    ours, theirs = final_weights(whole, name), final_weights(whole, "whole")
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in theirs) < 1e-5
    counted = ("env/steps", "env/resets", "env/broken")
    assert [[line[key] for key in counted] for line in metrics(whole, name)] == [
        [line[key] for key in counted] for line in metrics(whole, "whole")
    ], "counted alike, wherever episodes and simulators are"
    is_on_device = any(each.startswith("schedule.placement.env") for each in overrides)
    lines = (whole / name / "metrics.jsonl").read_text().splitlines()
    assert all((json.loads(line)["goodput/simulate"] > 0) == is_on_device for line in lines)


def test_environments_that_wait_for_one_another_are_answered_in_one_pass(whole: Path) -> None:
    run(whole, "together", ("schedule.granularity.env=100%", "episode.env.num_envs=4", "cluster.devices=cpu:1"))
    assert samples(whole, "together") == samples(whole, "whole")
    lines = [json.loads(line) for line in (whole / "together" / "metrics.jsonl").read_text().splitlines()]
    num_passes = sum(line["rollout/num_steps"] for line in lines)
    assert 2 * num_passes < sum(line["env/actions"] for line in lines), "a chunk is one action"


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(whole: Path) -> None:
    assert run(whole, "stopped", stop_after=1).was_stopped
    assert run(whole, "stopped", resume=True).done_steps == 3
    assert samples(whole, "stopped") == samples(whole, "whole")
    assert equal_weights(final_weights(whole, "stopped"), final_weights(whole, "whole"))


EMBODIED = ("rlinf-embodied-collocated", "rlinf-embodied-disaggregated", "rlinf-embodied-hybrid", "embodied-async")


@pytest.mark.parametrize("preset", EMBODIED)
def test_the_presets_for_robots_place_simulators_on_devices(whole: Path, preset: str) -> None:
    settings = [f"schedule.preset={preset}", "cluster.devices=cpu:4", "episode.env.num_envs=4", "steps=2"]
    assert run(whole, preset, [*settings, "task.starts.heldout_size=0"]).done_steps == 2
    bound = 2 if preset == "embodied-async" else 0
    for line in (whole / preset / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["goodput/simulate"] > 0 and row["sched/staleness_max"] <= bound


def test_a_robots_preset_on_too_few_devices_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"placement.env = '25-50%' is no whole device of 2"):
        run(tmp_path, "few", ["schedule.preset=rlinf-embodied-disaggregated"])
    with pytest.raises(UserError, match=r"num_envs=1, but schedule.placement.env makes 2 instances"):
        run(tmp_path, "envs", ["schedule.placement.env=all", "episode.env.num_envs=1"])


@pytest.mark.parametrize("preset", ["async-colocated", "areal"])
def test_stale_episodes_are_trained_too(tmp_path: Path, preset: str) -> None:
    report = run(tmp_path, "stale", [f"schedule.preset={preset}"])
    assert report.done_steps == 3
    assert max(line["sched/staleness_max"] for line in metrics(tmp_path, "stale")) >= 1
    assert all(np.isfinite(line["actor/loss"]) for line in metrics(tmp_path, "stale"))


def test_episodes_whose_simulator_broke_begin_again_and_end_once(tmp_path: Path) -> None:
    faults = f"episode.env.settings={{tasks: [near, far], horizon: 12, faults: [raise, exit], folder: {tmp_path}}}"
    run(tmp_path, "faults", [*DOT, faults, "steps=1", "warmup=null", "task.starts.heldout_size=0"])
    [line] = metrics(tmp_path, "faults")
    assert line["env/broken"] == 2 and {"raise", "exit"} <= {path.name for path in tmp_path.iterdir()}
    assert line["samples/trained"] == 16 and line["samples/failed"] == 0
    keys = {(shown["group"], shown["index"]) for shown in samples(tmp_path, "faults")}
    assert len(keys) == len(samples(tmp_path, "faults")) == 16


@pytest.mark.parametrize("decoding", ["parallel", "tokens"])
def test_imitation_of_an_expert_already_solves_both_tasks_by_their_instructions(tmp_path: Path, decoding: str) -> None:
    report = run(tmp_path, "dot", [*DOT, f"model.robot.decoding={decoding}"])
    assert report.before is not None and report.before.greedy_accuracy >= 0.6
    by_task = {name: each["greedy"].num_prompts for name, each in report.before.estimates.items()}
    assert by_task == {"": 16, "push the puck down": 8, "push the puck up": 8}
    for line in metrics(tmp_path, "dot"):
        assert {"env/success", "env/success/near", "env/success/far"} <= set(line)
        assert line["env/success"] == line["reward/mean"]
    text = samples(tmp_path, "dot")[0]
    assert "success after" in str(text)


def test_a_chunk_that_was_cut_off_is_not_executed(tmp_path: Path) -> None:
    long = ["episode.env.settings={tasks: [near, far], horizon: 40}", "model.robot.chunk=40", "rollout.max_tokens=24"]
    with pytest.raises(InterlaceError, match=r"of the 40 tokens of a chunk: .* Set rollout.max_tokens higher"):
        run(tmp_path, "short", [*DOT, *long, "model.robot.decoding=tokens", "warmup=null"])


def test_a_run_is_evaluated_on_a_task_that_it_was_not_trained_on(tmp_path: Path) -> None:
    settings = "episode.env.settings={{tasks: [{}], horizon: 12}}"
    starts = "task.starts={{instructions: [{}], train_size: 16, heldout_size: 4, seed: {}}}"
    seen = [settings.format("near"), starts.format("push the puck down", 0)]
    run(tmp_path, "near", [*DOT, *seen, "steps=1", "warmup.steps=40"])
    unseen = [settings.format("far"), starts.format("push the puck up", 1)]
    recipe = make_evaluated_recipe(str(tmp_path / "near"), None, unseen)
    found = evaluate_model(recipe, QuietProgress())
    assert found.num_prompts == 4 and 0 <= found.greedy_accuracy <= 1 and not found.warning
    assert found.sampled_accuracy is not None


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("maniskill", "mani_skill", "maniskill"), ("libero", "libero", "libero"), ("robot-mjx", "mujoco.mjx", "mjx")],
)
def test_recipes_of_other_simulators_run_or_say_which_extra_they_need(
    tmp_path: Path, name: str, library: str, extra: str
) -> None:
    if find_spec(library) is None:
        with pytest.raises(UserError, match=rf"pip install 'interlace\[{extra}\]'"):
            check_recipe(load_recipe(name))
        return
    settings = ["steps=1", "task.starts.heldout_size=0", "logging.loggers=[]"]
    assert run_recipe(name, tmp_path, name, settings).done_steps == 1


def test_a_gaussian_head_trains_by_ppo_under_every_placement(tmp_path: Path) -> None:
    """Numbers show the last bits of weights, which bins of tokens hide: placements agree as their weights do."""
    short = ["episode.env.settings={tasks: [Pendulum-v1], horizon: 12}", f"model.cache_dir={tmp_path / 'cache'}"]
    runs: dict[str, list[str]] = {
        "one": [],
        "workers": ["episode.env.workers=2"],
        "apart": ["schedule.preset=rlinf-disaggregated"],
    }
    for name, more in runs.items():
        settings = [*SMALL[:3], *short, *SMALL[4:], "steps=2", "minibatches=1", "epochs=1", *more]
        run_recipe("robot-pendulum", tmp_path, name, settings)
    assert samples(tmp_path, "one") == samples(tmp_path, "workers")
    for ours, theirs in zip(samples(tmp_path, "apart"), samples(tmp_path, "one"), strict=True):
        assert ours["uid"] == theirs["uid"] and ours["reward"] == pytest.approx(theirs["reward"], rel=1e-4)
    for line in metrics(tmp_path, "one"):
        assert line["actor/logprob_gap"] < 1e-5 and np.isfinite(line["actor/loss"])
        assert line["env/episode_length"] == 12 and line["env/return"] < 0
    mine, its = final_weights(tmp_path, "apart"), final_weights(tmp_path, "one")
    assert max(float((mine[key] - its[key]).abs().max()) for key in its) < 1e-4


def test_a_policy_that_sees_pixels_goes_the_whole_way(tmp_path: Path) -> None:
    sees = ["model.robot.state_size=0", "model.robot.image_size=42", "warmup.steps=4", "algorithm.ratio_of=turn"]
    report = run(tmp_path, "pixels", [*DOT, *sees])
    assert report.done_steps == 2
    assert all(line["actor/logprob_gap"] < 0.2 for line in metrics(tmp_path, "pixels"))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_chosen_episodes_are_filmed_before_and_after(tmp_path: Path, workers: int) -> None:
    """Also where episodes run in processes of their own."""
    pytest.importorskip("pygame")
    pytest.importorskip("imageio_ffmpeg")
    shown = ["evaluation.num_shown=2", "logging.loggers=[tensorboard]", f"episode.workers={workers}"]
    shown.append("evaluation.filmed=first")
    run(tmp_path, "filmed", ["steps=1", *shown])
    folder = tmp_path / "filmed"
    films = read_films(folder / "videos")
    assert [film.step for film in films] == [0, 0, 1, 1]
    assert [film.name for film in films[:2]] == [film.name for film in films[2:]]
    assert all(film.video and film.video.stat().st_size > 500 for film in films)
    assert list((folder / "tensorboard" / "videos").iterdir())
    write_report([RunFolder.named(tmp_path, "filmed")], tmp_path / "report.html")
    assert "contact sheet" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_perturbed_set_has_the_same_states_and_its_interval(tmp_path: Path) -> None:
    sets = "{language: {starts: {instructions: [shove the puck south, shove it north], heldout_size: 8}}}"
    settings = [*SMALL, *DOT, "steps=1", "warmup=null", f"model.cache_dir={tmp_path}", f"task.heldout_sets={sets}"]
    recipe = load_recipe("robot-cartpole", [*settings, "task.starts.heldout_size=8", "evaluation.samples_per_prompt=0"])
    prompts = recipe_prompts(recipe, load_tokenizer(recipe.model)).heldout
    own, other = ([prompt for prompt in prompts if prompt.source == name] for name in ("", "language"))
    columns = ("task", "init_state")
    assert [[one.metadata[name] for name in columns] for one in own] == [
        [one.metadata[name] for name in columns] for one in other
    ]
    found = evaluate_model(recipe, QuietProgress()).estimates
    assert found["language"]["greedy"].num_prompts == found["task"]["greedy"].num_prompts == 8
    assert {"shove the puck south", "shove it north"} <= set(found), "and each task's"
    greedy = found["language"]["greedy"]
    assert greedy.low is not None and greedy.high is not None and greedy.low <= greedy.value <= greedy.high
    beyond = "{language: {starts: {instructions: [push it], tasks: [2]}}}"
    with pytest.raises(UserError, match=r"of task.heldout_sets.language.starts is of task 2"):
        check_recipe(load_recipe("robot-cartpole", [*settings, f"task.heldout_sets={beyond}"]))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_outcomes_choose_the_filmed_episodes(tmp_path: Path, workers: int) -> None:
    """They are run once more for the film, with the outcome that chose them, and no training result changes."""
    pytest.importorskip("pygame")
    pytest.importorskip("imageio_ffmpeg")
    settings = ["steps=1", "logging.loggers=[]", f"episode.workers={workers}", "task.starts.heldout_size=6"]
    run(tmp_path, "chosen", [*settings, "evaluation.num_shown=4"])
    run(tmp_path, "every", [*settings, "evaluation.filmed=first", "evaluation.num_shown=100"])
    chosen, every = (read_films(tmp_path / name / "videos") for name in ("chosen", "every"))
    lengths = {film.name: int(film.caption.split()[-2]) for film in every if film.step == 0}
    first = {film.label: film for film in chosen if film.step == 0}
    assert {"best", "worst"} <= set(first) <= {"best", "worst", "random failure"} and len(lengths) == 6
    assert all(f"after {lengths[film.name]} actions" in film.caption for film in first.values())
    assert lengths[first["worst"].name] == min(lengths.values())
    assert lengths[first["best"].name] == max(lengths.values())
    assert samples(tmp_path, "chosen") == samples(tmp_path, "every")
    write_report([RunFolder.named(tmp_path, "chosen")], tmp_path / "report.html")
    assert "worst: CartPole-v1, start" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_episodes_that_rows_choose_among_are_filmed_too(tmp_path: Path, workers: int) -> None:
    pytest.importorskip("pygame")
    pytest.importorskip("imageio_ffmpeg")
    env = "{family: gymnasium, num_envs: 8, workers: 1, settings: {tasks: [CartPole-v1], horizon: 40}}"
    features = "[{of: [0, 1, 2, 3], scale: [2.4, 3.0, 0.2, 3.0]}]"
    others = f"episode.others={{'0': {{name: robot, env: {env}, features: {features}}}}}"
    shown = ["evaluation.num_shown=2", "evaluation.filmed=first", f"episode.workers={workers}", "steps=1"]
    run(tmp_path, "rows", [others, "episode.column=task", *shown])
    assert [film.step for film in read_films(tmp_path / "rows" / "videos")] == [0, 0, 1, 1]


@pytest.mark.slow
def test_ranks_with_fewer_samples_than_others_train_as_one(tmp_path: Path) -> None:
    """A minibatch is one episode, so one of two ranks has no observation in it, and no use for the projector."""
    for name, more in (("one", ()), ("two", ("actor.ranks=2", "critic.ranks=2"))):
        run(tmp_path, name, ["steps=1", "minibatches=4", *more])
    one, two = (final_weights(tmp_path, name) for name in ("one", "two"))
    assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-4
