"""Settings of runs on given rows, and what commands about generation answer."""

import json
from pathlib import Path

import pytest

from interlace.cli.chaos import certify_faults
from interlace.core.errors import UserError
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.simulate import Simulation, check_simulated
from interlace.run.library import ProgramInputs, trains_on_rows
from interlace.run.recipe.check_objective import refuse_offline, refuse_unprofiled
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.load import load_recipe

OFFLINE = ("sft", "dpo", "reward-model")


@pytest.mark.parametrize("name", OFFLINE)
def test_commands_about_generation_refuse_given_rows_in_one_sentence(name: str) -> None:
    with pytest.raises(UserError, match="`interlace plan` is for recipes whose policy generates samples"):
        refuse_offline(load_recipe(name), "plan")


@pytest.mark.parametrize(
    "servers",
    ["rollout={engine: address, urls: [http://a:1]}", "reference.service={engine: address, urls: [http://a:1]}"],
)
def test_forecasts_refuse_engines_that_are_servers_elsewhere(servers: str) -> None:
    recipe = load_recipe("quickstart", [servers])
    with pytest.raises(UserError, match=r"`interlace plan` predicts engines on the devices.*servers elsewhere"):
        refuse_unprofiled(recipe, "plan")
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=2)
    with pytest.raises(UserError, match="`interlace simulate` predicts engines"):
        check_simulated({"": recipe}, simulation.profile, simulation.devices)


def test_chaos_refuses_given_rows() -> None:
    with pytest.raises(UserError, match="`interlace chaos` is for recipes whose policy generates samples"):
        certify_faults("sft", [], ())


def test_a_program_may_give_rows_with_completions(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "chosen": "2", "rejected": "3"}]
    assert trains_on_rows("dpo", {})
    assert not trains_on_rows("quickstart", {})
    sections = ProgramInputs(data=rows).sections(tmp_path, {}, has_completions=True)
    [path] = sections.rows
    assert json.loads(path.read_text())["rejected"] == "3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["reward=exact"], "`reward` has no effect"),
        (["epochs=2"], "takes each row once"),
        (["sampling.temperature=0.7"], "sampling.temperature=0.7"),
        (["schedule=auto"], "schedule=auto plans generation"),
    ],
)
def test_settings_without_effect_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_settings(load_recipe("sft", changes))


def test_the_reference_point_of_kto_needs_a_second_row() -> None:
    """With one row it would be the mean reward of the completions of this row."""
    check_settings(load_recipe("dpo", ["algorithm.loss=kto", "prompts_per_step=2", "minibatches=1"]))
    with pytest.raises(UserError, match=r"prompts_per_step=1: .* Set it to 2 or more"):
        check_settings(load_recipe("dpo", ["algorithm.loss=kto", "prompts_per_step=1", "minibatches=1"]))
    check_settings(load_recipe("dpo", ["prompts_per_step=1", "minibatches=1"]))
