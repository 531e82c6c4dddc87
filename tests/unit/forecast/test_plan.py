"""Plans by the real simulator can run, and the command prints complete answers."""

import json
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.core.errors import UserError
from interlace.forecast.costs.markets import load_market
from interlace.forecast.costs.profiles import change_profile, load_profile
from interlace.forecast.costs.scale import scale_model
from interlace.forecast.plan import PlanRequest, PlanSettings, RecipePlan, make_plan, recipe_for
from interlace.forecast.profile.types import Lengths, Profile, RewardCosts, RolloutCosts, TrainCosts
from interlace.forecast.scoring import Workplace, score_of
from interlace.forecast.search.bounds import Workload, misfit
from interlace.forecast.search.candidates import Candidate, neighbours, plain
from interlace.forecast.search.plans import Fidelity, Score, list_changes
from interlace.forecast.simulate import Simulation, check_simulated, simulate
from interlace.run.recipe.config import set_schedule
from interlace.run.recipe.load import load_recipe, recipe_path
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule

GIB = 2**30


def test_a_plan_and_its_simulation_let_moments_leave_a_device_that_computes() -> None:
    profile = load_profile("qwen2.5-7b-h800")
    [devices, recipe] = [4, load_recipe("quickstart", ["prompts_per_step=8", "steps=1"])]
    for moment_bytes, fits in ((0, False), (profile.actor.state_bytes // 2, True)):
        actor = profile.actor.model_copy(update={"moment_bytes": moment_bytes})
        small = profile.model_copy(update={"actor": actor, "device_memory_bytes": 40 * 10**9})
        costs = small.rollout.model_copy(update={"device_bytes": 10**9})
        small = small.model_copy(update={"rollout": costs})
        simulation = Simulation(profile=small, num_devices=devices, num_prompts=64)
        workload = Workload(num_devices=devices, prompts_per_step=8, samples_per_prompt=8, max_new_tokens=64)
        schedule = Schedule.parse({"placement": {"actor": {"devices": "all", "devices_per_instance": "all"}}})
        assert (misfit(schedule, small, workload, simulation.devices) is None) == fits
        if fits:
            assert simulate(set_schedule(recipe, schedule), simulation).results
        else:
            with pytest.raises(UserError, match="GiB on"):
                simulate(set_schedule(recipe, schedule), simulation)


def test_a_schedule_that_trains_nothing_has_a_score() -> None:
    """DAPO filters every group if no response is right."""
    profile = load_profile("qwen2.5-7b-h800").model_copy(update={"reward": RewardCosts(solve_rate=0.0)})
    sizes = ("steps=3", "prompts_per_step=4", "samples_per_prompt=2", "minibatches=1")
    recipe = load_recipe("quickstart", [*sizes, "algorithm=dapo", "schedule=areal"])
    simulation = Simulation(profile=profile, num_devices=8, num_prompts=64)
    found = score_of(simulate(recipe, simulation), 2, simulation, recipe)
    assert found.tokens_per_s == found.length_shift == 0.0


def random_profile(random: Random) -> Profile:
    """Costs and memory of any proportion: some candidates do not fit."""
    step_s = random.choice([0.002, 0.01, 0.05])
    return Profile(
        device="a test's",
        device_memory_bytes=80 * GIB,
        rollout=RolloutCosts(
            steps=((1, step_s), (64, step_s * random.uniform(1.0, 3.0))),
            context_token_s=random.choice([0.0, 1e-7]),
            call_s=random.choice([0.0, 0.001]),
            prefill_token_s=1e-5,
            kv_tokens=random.choice([3_000, 20_000, 800_000]),
            kv_token_s=1e-6,
            max_running=random.choice([4, 64, 512]),
            update_s=random.choice([0.0, 0.3]),
            state_bytes=random.choice([1, 15, 70]) * GIB,
            device_bytes=random.choice([1, 40]) * GIB,
            onload_s=0.5,
            offload_s=0.5,
            scaling=((2, 1.5), (4, 2.0)),
        ),
        actor=TrainCosts(
            token_s=random.choice([1e-5, 2e-4]),
            inference_token_s=3e-5,
            optimizer_s=0.3,
            export_s=random.choice([0.0, 2.0]),
            state_bytes=random.choice([20, 100, 300]) * GIB,
            moment_bytes=random.choice([0, 10]) * GIB,
            working_bytes=14 * GIB,
            onload_s=1.0,
            offload_s=1.0,
        ),
        reward=RewardCosts(median_s=random.choice([0.0, 1.0]), sigma=0.8, workers=random.choice([1, 64])),
        lengths=Lengths(median=random.choice([50, 400]), cap_share=random.choice([0.0, 0.03])),
    )


def walk(random: Random, workload: Workload, length: int) -> Candidate:
    """A candidate that a search can come to."""
    presets = [Candidate.of(load_schedule(name), name) for name in preset_names()]
    here = random.choice([*plain(), *presets])
    for _ in range(length):
        near = neighbours(here, spans=workload.spans, has_reference="reference" in workload.roles)
        here = random.choice([each for decision in near for each in decision])
    return here


def check_random_workloads(first_seed: int, *, accepted: int) -> None:
    """Runs one candidate of each random workload to its end, until so many were accepted and ran."""
    for seed in count(first_seed):
        if not accepted:
            return
        random = Random(seed)
        profile, num_devices = random_profile(random), random.choice([1, 2, 3, 4, 8])
        reference = random.random() < 0.4
        minibatches = random.choice([1, 2])
        recipe = load_recipe(
            "longtail",
            [
                f"prompts_per_step={random.choice([2, 4, 8])}", f"samples_per_prompt={random.choice([2, 4])}",
                f"minibatches={minibatches}", "sampling.max_new_tokens=1000", f"seed={seed}",
                f"algorithm={{name: {random.choice(['grpo', 'dapo'])}, kl_coefficient: {0.01 * reference}}}"
                if reference else "algorithm=grpo",
            ],
        )  # fmt: skip
        simulation = Simulation(profile=profile, num_devices=num_devices, num_prompts=512)
        workload = PlanRequest(recipe=recipe, simulation=simulation).workload
        candidate = walk(random, workload, random.randrange(6))
        schedule = candidate.on(num_devices)
        if schedule is None or misfit(schedule, profile, workload, simulation.devices):
            continue
        accepted -= 1
        fidelity = Fidelity(steps=2)
        found = Workplace(recipe=recipe, simulation=simulation).score(schedule, fidelity)
        assert isinstance(found, Score), f"seed {seed}: {found} under {list_changes(schedule)}"
        assert found.staleness_max <= schedule.staleness_bound
        steps = fidelity.num_steps(schedule)
        whole = simulate(set_schedule(recipe, schedule).model_copy(update={"steps": steps}), simulation)
        assert len(whole.results) == steps


def test_what_is_accepted_runs() -> None:
    check_random_workloads(0, accepted=15)


@pytest.mark.slow
def test_what_is_accepted_runs_whatever_the_workload() -> None:
    check_random_workloads(1000, accepted=500)


def quick(recipe: str = "longtail", *changes: str, **settings: object) -> PlanRequest:
    sizes = ["prompts_per_step=8", "samples_per_prompt=4", "sampling.max_new_tokens=2000"]
    loaded = load_recipe(recipe, [*sizes, *changes])
    return PlanRequest(
        recipe=loaded,
        simulation=Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=8, num_prompts=256),
        settings=PlanSettings.parse({"search_processes": 1, "search_s": 600, "search_samples": 12_000, **settings}),
    )


@pytest.fixture(scope="module")
def made() -> RecipePlan:
    return make_plan(quick(max_staleness=4))


def test_the_best_plan_beats_the_baseline_and_keeps_to_its_prediction(made: RecipePlan) -> None:
    request = made.request
    ratio = made.found.ratio(made.found.best)
    assert ratio is not None and ratio > 1.5
    assert made.found.best.staleness_bound <= 4
    steps = 24
    recipe = set_schedule(request.recipe, made.found.best.schedule).model_copy(update={"steps": steps})
    rows = simulate(recipe, request.simulation).run.rows[8:16]
    measured = sum(float(row["timing_s/step"]) for row in rows) / len(rows)
    assert measured == pytest.approx(made.found.best.score.step_s, rel=0.3)


def test_a_deadline_is_held_on_as_few_device_seconds_as_can_be(made: RecipePlan) -> None:
    hours = 3 * made.found.best.score.step_s * made.request.recipe.steps / 3600
    held = make_plan(quick(max_staleness=4, deadline_h=hours))
    assert held.found.best.score.step_s * held.request.recipe.steps <= 3600 * hours
    assert held.request.simulation.num_devices < 8


def test_a_model_of_a_cluster_takes_about_as_long() -> None:
    recipe = load_recipe("longtail", ["prompts_per_step=64", "samples_per_prompt=8", "sampling.max_new_tokens=8000"])
    place = Workplace(
        recipe=recipe, simulation=Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=64, num_prompts=512)
    )
    for name in ("verl-colocated", "areal"):
        schedule = Candidate.of(load_schedule(name))
        small = place.score(schedule.on(16), Fidelity(scale=4, steps=3))
        whole = place.score(schedule.on(64), Fidelity(steps=3))
        assert isinstance(small, Score) and isinstance(whole, Score)
        assert small.step_s == pytest.approx(whole.step_s, rel=0.2), name


def test_a_scale_model_keeps_the_time_that_training_takes() -> None:
    profile = load_profile("qwen2.5-7b-h800")
    small = scale_model(profile, 8, 256)
    whole_s = 4096 * 5000 * profile.actor.token_s / profile.actor.speed(256)
    assert 512 * 5000 * small.actor.token_s / small.actor.speed(32) == pytest.approx(whole_s)
    assert small.actor.memory_bytes(32) == pytest.approx(profile.actor.memory_bytes(256), rel=1e-6)


def test_sizes_of_another_models_profile_stand_in_for_the_recipes() -> None:
    profile = load_profile("qwen2.5-7b-h800")
    given, overrides = load_recipe("longtail", ["prompts_per_step=64"]), ["prompts_per_step=64"]
    recipe, note = recipe_for(given, "longtail", overrides, profile)
    assert (recipe.prompts_per_step, recipe.samples_per_prompt, recipe.sampling.max_new_tokens) == (64, 16, 28672)
    assert "Qwen/Qwen2.5-7B" in note
    own = profile.model_copy(update={"model": "tiny:micro"})
    assert recipe_for(given, "longtail", overrides, own) == (given, "")


def test_the_command_prints_one_object_and_writes_a_schedule(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "longtail", "--devices", "4", "--profile", "qwen2.5-7b-h800", "--max-staleness", "1", "--json"]
    sizes = ["prompts_per_step=8", "samples_per_prompt=2", "sampling.max_new_tokens=500"]
    rented = ["--market", "spot", "plan.device_hour_cost=4", "steps=100", "checkpoint_every=20"]
    result = CliRunner().invoke(app, [*words, *sizes, *rented, "plan.search_samples=12000", "plan.search_processes=1"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    best, market = told["best"], load_market("spot")
    interrupted = best["interruptions"]
    assert interrupted["per_day"] == market.interruptions_per_node_day, "four devices are a part of one node"
    assert interrupted["restart_loss_s"] == pytest.approx(market.restart_s + 10 * best["step_s"])
    share = best["market_price_per_million_tokens"] / best["price_per_million_tokens"]
    assert share == pytest.approx(market.price_share / interrupted["effective_time"])
    assert told["best"]["ratio"] >= 1
    assert told["measured"] is None
    assert {why["preset"] for why in told["why_not"]} <= set(preset_names())
    assert len(told["why_not"]) >= 18
    assert load_schedule(str(tmp_path / "plan.yaml")).model_dump(mode="json") == told["best"]["schedule"]
    assert "<svg" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--devices", "4"], "--profile is missing"),
        (["--devices", "4", "--profile", "qwen2.5-7b-h800", "--probe"], "leave one out"),
        (
            ["--devices", "1", "--profile", "qwen2.5-7b-h800", "plan.search_processes=1"],
            "no plan fits into memory.*actor",
        ),
        (["--profile", "qwen2.5-7b-h800"], "this machine has"),
        (["plan.deadline_h=0"], "deadline_h"),
        (["plan.deadlines=3"], "unknown key"),
        (["--market", "spott"], "unknown market 'spott'"),
        (
            ["--devices", "8", "--profile", "qwen2.5-7b-h800", "plan.deadline_h=0.001", "plan.search_samples=12000"],
            "best plan found",
        ),
    ],
)
def test_bad_input_is_told(words, reason, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["prompts_per_step=8", "samples_per_prompt=2", "sampling.max_new_tokens=500"]
    result = CliRunner().invoke(app, ["plan", "longtail", *words, *sizes])
    assert result.exit_code == 2, result.output
    import re

    assert re.search(reason, result.output, re.DOTALL), result.output


def test_a_profile_of_another_model_or_machine_is_refused_here() -> None:
    from interlace.forecast.profile.profile import check_profile, device_name
    from interlace.run.clusters.base import back_end

    recipe = load_recipe("quickstart")
    here = device_name(back_end(recipe.cluster).find_devices(recipe.cluster)[0])
    shipped = load_profile("qwen2.5-7b-h800")
    with pytest.raises(UserError, match=r"roofline.*this machine has"):
        check_profile(shipped, recipe)
    mine = shipped.model_copy(update={"device": here, "basis": "measured"})
    with pytest.raises(UserError, match=r"is of model 'Qwen/Qwen2.5-7B', and the recipe trains"):
        check_profile(mine, recipe)
    check_profile(mine.model_copy(update={"model": recipe.model.path}), recipe)


def test_no_memory_says_which_part_is_too_large_and_by_how_much() -> None:
    request = quick(max_staleness=4)
    small = request.simulation.profile.model_copy(update={"device_memory_bytes": 20 * GIB})
    with pytest.raises(
        UserError, match=r"no plan fits into memory.* needs [0-9.]+ GiB on each, which is [0-9.]+ GiB more"
    ):
        make_plan(replace(request, simulation=replace(request.simulation, profile=small)))


def test_constraints_that_contradict_each_other_are_told_with_what_can_be_had() -> None:
    request = quick(max_staleness=0, deadline_h=1e-6)
    with pytest.raises(
        UserError, match=r"plan.deadline_h=1e-06: .* with the best plan found, .* s per step .*Set plan.deadline_h="
    ):
        make_plan(request)


def test_an_engine_that_cannot_divide_its_model_has_one_device() -> None:
    request = quick()
    profile = change_profile(request.simulation.profile, ["rollout.max_devices=1"])
    alone = replace(request, simulation=replace(request.simulation, profile=profile))
    assert (request.workload.spans, alone.workload.spans) == ((1, 2, 4, 8), (1,))
    placed = "schedule.placement.rollout={devices: all, devices_per_instance: 4}"
    recipe = load_recipe("longtail", [placed])
    check_simulated({"longtail": recipe}, request.simulation.profile, request.simulation.devices)
    for given, num_devices in ((recipe, 4), (load_recipe("longtail", [placed.replace("4", "all")]), 8)):
        with pytest.raises(
            UserError, match=rf"engines of {num_devices} devices, .* at most 1 .*profile.rollout.max_devices=0"
        ):
            check_simulated({"longtail": given}, profile, request.simulation.devices)


@pytest.mark.parametrize("name", ["rlinf-maniskill", "rlinf-libero"])
def test_rlinfs_profiles_have_a_whole_model_on_each_device(name: str) -> None:
    assert load_profile(name).rollout.max_devices == 1


def test_devices_that_are_not_there_are_named() -> None:
    recipe = load_recipe("longtail", ["schedule.placement.rollout=0-11"])
    with pytest.raises(UserError, match=r"names device 11, but the pool has 8"):
        simulate(recipe, quick().simulation)


def test_a_plan_for_devices_by_their_data_sheet_reads_the_recipe_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, read_text, read = tmp_path / "own.yaml", Path.read_text, list[Path]()
    own.write_text(recipe_path("quickstart").read_text(encoding="utf-8"), encoding="utf-8")

    def read_and_count(path: Path, encoding: str | None = None) -> str:
        read.append(path)
        return read_text(path, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", read_and_count)
    words = ["plan", str(own), "samples_per_prompt=1", "--devices", "2xH100-80GB", f"plan.file={tmp_path / 'a.yaml'}"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2 and "Set samples_per_prompt to 2" in " ".join(found.output.split())
    assert read.count(own) == 1


def test_a_search_ends_in_time_and_returns_the_best_so_far() -> None:
    """A profile of a large cluster, of which the time allows few simulations; CPU seconds of others count as well."""
    changes = ["steps=4"]
    recipe, _ = recipe_for(load_recipe("longtail", changes), "longtail", changes, load_profile("qwen2.5-7b-h800"))
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=64)
    settings = PlanSettings(search_s=8.0, search_processes=1)
    before_s = monotonic()
    lines: list[str] = []
    made = make_plan(PlanRequest(recipe=recipe, simulation=simulation, settings=settings), say=lines.append)
    assert monotonic() - before_s < 1.1 * settings.search_s + 2.0, "two seconds for a machine that others use as well"
    assert made.found.ranked
    assert lines and lines[0].startswith("planning, ")


def test_ctrl_c_ends_a_search_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[Schedule] = []
    score = Workplace.score

    def interrupted(self: Workplace, schedule: Schedule, fidelity: Fidelity, *, stop_at_s: float) -> object:
        if len(scored) == 3:
            raise KeyboardInterrupt
        scored.append(schedule)
        return score(self, schedule, fidelity, stop_at_s=stop_at_s)

    monkeypatch.setattr(Workplace, "score", interrupted)
    assert make_plan(quick()).found.num_scored == 3


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_between_two_simulations_ends_a_search_with_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, presses: int
) -> None:
    """The signal arrives while the search checks schedules, not while it simulates one. A second one follows fast."""
    interrupted: list[Schedule] = []
    scored: list[Schedule] = []
    score = Workplace.score

    def count(self: Workplace, schedule: Schedule, fidelity: Fidelity, *, stop_at_s: float) -> object:
        scored.append(schedule)
        return score(self, schedule, fidelity, stop_at_s=stop_at_s)

    def interrupt(schedule: Schedule) -> None:
        if scored and not interrupted:
            interrupted.append(schedule)
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Workplace, "score", count)
    made = make_plan(quick(), accepts=interrupt)
    assert made.found.ranked and made.found.num_scored == len(scored)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
