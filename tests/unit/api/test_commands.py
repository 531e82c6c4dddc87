"""Functions of a program take the settings of their commands."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import interlace
from interlace.api import background
from interlace.api.commands import SchedulePlan, ScheduleTable
from interlace.core.errors import InterlaceError, UserError
from interlace.observe.run_folder import RunFolder


def test_a_simulation_changes_its_profile_and_its_engines() -> None:
    def step_s(*changes: str) -> object:
        overrides = ["warmup=null", "steps=2", *changes]
        found = interlace.simulate("quickstart", overrides, profile="qwen2.5-7b-h20", devices=4, prompts=64)
        return found.rows[0]["step_s"]

    assert step_s("profile.lengths.median=9") != step_s()
    with pytest.raises(UserError, match="engines='soon': 'soon' is no change"):
        step_s("engines=soon")


def test_a_recipe_is_a_path_and_schedules_are_a_list(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text((Path(interlace.__file__).parent / "recipes" / "quickstart.yaml").read_text(encoding="utf-8"))
    sizes = ["warmup=null", "steps=2", "prompts_per_step=4", "samples_per_prompt=2"]
    schedules = ["verl-colocated", "areal"]
    found = interlace.simulate(recipe, sizes, schedule=schedules, profile="qwen2.5-7b-h20", devices=16)
    assert [row["schedule"] for row in found.rows] == schedules
    assert interlace.dry_run(recipe, steps=2).sizes.num_versions == 2
    with pytest.raises(UserError, match=r"nothing\.yaml'?: there is no such file"):
        interlace.profile(tmp_path / "nothing.yaml", out=tmp_path / "profile.json")


@pytest.mark.parametrize("command", ["simulate", "compare", "plan", "profile", "sweep", "evaluate", "serve", "train"])
def test_an_object_that_names_nothing_is_refused_by_its_type(command: str, tmp_path: Path) -> None:
    """The text of an object is no name, and a long one is no path either."""
    call = getattr(interlace, command)
    further: dict[str, object] = {"compare": {"schedules": "areal"}, "sweep": {"settings": {"seed": [0, 1]}}}.get(
        command, {}
    )
    given = {"steps": 1} if command == "train" else interlace.load_recipe("quickstart")
    with pytest.raises(UserError, match=f"is of type {type(given).__name__}: give "):
        call(given, **further)


def test_a_run_is_a_recipe_and_its_folder_is_not(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "mine")
    folder.write_config(interlace.load_recipe("quickstart", ["warmup=null", "steps=2", "prompts_per_step=4"]))
    run = interlace.load_run(folder.path)
    [row] = interlace.simulate(run, profile="qwen2.5-7b-h20", devices=4, prompts=64).rows
    assert row["steps"] == 2
    with pytest.raises(UserError, match=r"Did you mean the file '.*mine/config\.yaml'"):
        interlace.train(folder.path)
    with pytest.raises(UserError, match=r"recipe is the run 'mine'\. To continue it .* resume=True"):
        interlace.train(run)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="unknown recipe 'aaa"):
        interlace.train("a" * 1000)


def test_a_simulation_takes_devices_by_their_data_sheet() -> None:
    def simulate(devices: str, *changes: str, profile: str | None = None) -> ScheduleTable:
        overrides = ["warmup=null", "steps=2", *changes]
        return interlace.simulate("quickstart", overrides, devices=devices, profile=profile, prompts=64)

    [row] = simulate("4xH100-80GB").rows
    assert row["step_s"] == simulate("4xh100").rows[0]["step_s"] != simulate("4xL40S").rows[0]["step_s"]
    changed = simulate("4xH100-80GB", "profile.lengths.median=9", "engines=0.5:-1,1:+1", "prompts_per_step=4")
    assert changed.rows[0]["samples"] != row["samples"]
    with pytest.raises(UserError, match=r"8xH100-40GB: .* such as 8xH100-80GB"):
        simulate("8xH100-40GB")
    with pytest.raises(UserError, match=r"by their data sheet: leave out profile\."):
        simulate("4xH100", profile="qwen2.5-7b-h20")
    with pytest.raises(UserError, match=r"a number and a kind \(8xH100-80GB\)"):
        simulate("8xH100,2")


def test_schedules_are_compared_on_a_virtual_cluster_as_by_the_command(tmp_path: Path) -> None:
    sizes = ["warmup=null", "prompts_per_step=4", "samples_per_prompt=2"]
    found = interlace.compare(
        "quickstart", sizes, schedules=["verl-colocated", "areal"], cluster="sim", devices=16, profile="qwen2.5-7b-h20",
        steps=2, folder=tmp_path, quiet=True,
    )  # fmt: skip
    assert [row["schedule"] for row in found.rows] == ["verl-colocated", "areal"]
    assert found.report is not None and found.report.is_file() and found.report.is_relative_to(tmp_path)
    with pytest.raises(UserError, match='add cluster="sim"'):
        interlace.compare("quickstart", sizes, schedules="areal", devices=4, folder=tmp_path)


def test_a_plan_explains_the_losses_of_each_preset(tmp_path: Path) -> None:
    sizes = ["warmup=null", "prompts_per_step=4", "samples_per_prompt=2", "plan.search_s=4", "plan.search_processes=1"]
    changes = [*sizes, f"plan.file={tmp_path / 'plan.yaml'}"]

    def plan(*, explain: bool) -> SchedulePlan:
        return interlace.plan(
            "quickstart", changes, devices=4, profile="qwen2.5-7b-h20", explain=explain, quiet=True, max_staleness=1
        )

    found = plan(explain=True)
    assert any(each.startswith("areal: ") for each in found.why_not) and f"- {found.why_not[0]}" in repr(found)
    assert "The profile is of" in found.note and found.note in repr(found), "other sizes than the recipe's"
    assert "Why not" not in repr(plan(explain=False))


def test_a_dry_run_takes_a_program_s_rows_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(8)]
    found = interlace.dry_run(model="tiny:micro", data=rows, reward="exact", steps=2, devices="1x24GB")
    assert found.sizes.num_train_prompts == 8 and found.sizes.num_updates == 2
    assert found.devices[0].is_shared and "cuda:0: " in repr(found) and "has 24.0 GiB" in repr(found)
    with pytest.raises(UserError, match=r"data\[8\] has no column 'prompt'"):
        interlace.dry_run(model="tiny:micro", data=[*rows, {"question": "?"}], reward="exact", steps=2)
    assert not [*tmp_path.iterdir()]


def test_values_out_of_range_are_mistakes_of_the_user() -> None:
    with pytest.raises(UserError, match=r"prompts=0: a data set has one prompt or more"):
        interlace.simulate("quickstart", ["warmup=null"], devices=4, profile="qwen2.5-7b-h20", prompts=0)
    with pytest.raises(UserError, match="port=70000: a port is a number from 0 to 65535"):
        interlace.serve("tiny:micro", port=70000)
    with pytest.raises(UserError, match=r"devices=2: write a number and the memory of one, as 1x24GB"):
        interlace.dry_run("quickstart", devices=2)
    with pytest.raises(UserError, match="max_staleness"):
        interlace.plan("quickstart", ["warmup=null"], devices=4, profile="qwen2.5-7b-h20", max_staleness=-1)


def test_a_server_that_fails_after_its_start_raises_the_error_when_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serve_and_fail(_recipe: object, _options: object, *, on_ready: Callable[[object], None], **_: object) -> None:
        async def run() -> None:
            on_ready(SimpleNamespace(url="http://127.0.0.1:1", api_key="a", admin_key="b"))
            raise InterlaceError("the engine is lost")

        asyncio.run(run())

    monkeypatch.setattr(background, "serve_model", serve_and_fail)
    server = interlace.serve("tiny:micro")
    with pytest.raises(InterlaceError, match="the engine is lost"):
        server.stop()
    server.stop()


def test_an_error_of_the_block_is_shown_if_the_server_fails_when_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_until_stopped(
        _recipe: object, _options: object, *, on_ready: Callable[[object], None], stop: asyncio.Event
    ) -> None:
        async def run() -> None:
            on_ready(SimpleNamespace(url="http://127.0.0.1:1", api_key="a", admin_key="b"))
            await stop.wait()
            raise InterlaceError("the engine is lost")

        asyncio.run(run())

    monkeypatch.setattr(background, "serve_model", serve_until_stopped)
    with pytest.raises(ValueError, match="mine"), interlace.serve("tiny:micro"):
        raise ValueError("mine")


def test_a_profile_is_of_a_run_s_records(tmp_path: Path) -> None:
    changes = ["warmup=null", "cluster.devices=cpu:2", f"model.cache_dir={tmp_path / 'cache'}"]
    table = interlace.compare(
        "quickstart", changes, schedules="verl-colocated", cluster="sim", devices=2, profile="qwen2.5-7b-h20", steps=6,
        folder=tmp_path / "runs",
    )  # fmt: skip
    run = interlace.load_run(str(table.rows[0]["folder"]))
    found = interlace.profile(run, out=tmp_path / "profile.json")
    assert found.model == "tiny:micro" and (tmp_path / "profile.json").is_file()
    assert [*(tmp_path / "cache" / "profiles").iterdir()], "plans of the recipe find it"
    with pytest.raises(UserError, match="is a run, whose records are of its own settings"):
        interlace.profile(run, ["seed=1"], out=tmp_path / "profile.json")
