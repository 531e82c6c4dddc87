"""One algorithm gives the same samples and weights under every synchronous schedule, on every cluster."""

import itertools
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.observe.stop import StopSignal
from interlace.run.equivalence import Trial, certify, toy, variants
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.sections import ClusterConfig
from tests.support.training import SMALL, shared_cache

# An untrained model's answers are all wrong, but not all of one length: something is learned.
LENGTHS = ("reward.name=tests.support.reward_functions:length", "reward.tag=null", "reward.answer_format=text")
NAMES = ("as given", "colocated", "disaggregated", "hybrid", "streaming", "dispatch", "switch", "partial")
IN_PIECES = ("hybrid", "streaming")
"""A minibatch is summed granule by granule."""
STREAMED = ("minibatches=1", "algorithm.kl_coefficient=0.1")
"""Log-probs are packed granule by granule too."""


def small(*overrides: str) -> Recipe:
    return toy(load_recipe("quickstart", [*SMALL, shared_cache(), *LENGTHS, *overrides]))


def trials(recipes: Mapping[str, Recipe], root: Path) -> dict[str, Trial]:
    return {trial.schedule: trial for trial in certify(recipes, root / "runs", StopSignal(lambda: None))}


def test_granules_change_no_sample_and_no_more_than_the_last_bits_of_a_weight(tmp_path: Path) -> None:
    chosen = ("as given", "colocated", "hybrid", "streaming")
    recipes = variants(small(*STREAMED))
    found = trials({name: recipes[name] for name in chosen}, tmp_path)
    assert all(trial.same_samples and trial.holds and trial.moved > 1e-5 for trial in found.values())
    assert found["colocated"].difference == 0, "the quick start's own schedule: a whole step is summed in one order"


@pytest.mark.slow  # six processes each
@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("schedule", NAMES)
def test_processes_sample_and_train_as_threads_do(tmp_path: Path, schedule: str) -> None:
    recipe = small()
    on_ray = recipe.model_copy(update={"cluster": ClusterConfig(backend="ray", devices="cpu:2")})
    found = trials({"local": recipe, schedule: variants(on_ray)[schedule]}, tmp_path)[schedule]
    assert found.same_samples and found.moved > 1e-5
    assert found.holds if schedule in IN_PIECES else found.difference == 0


def doctor(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_doctor_certifies_a_recipe(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(Path("interlace/recipes/quickstart.yaml").read_text())
    code, out, err = doctor("--equivalence", str(own), *SMALL, *LENGTHS, shared_cache(), "steps=50")
    assert code == 0, out + err
    assert "own.yaml at toy size: 3 steps of 4 prompts x 4 samples of at most 32 tokens after its warm-up" in out
    assert all(name in out for name in NAMES) and "Equivalent. Weights moved by up to" in out
    exact = len(NAMES) - len(IN_PIECES)
    assert out.count(" yes ") == len(NAMES) and out.count(" 0, to the bit ") >= exact, "a whole step is summed in order"


def in_order_of_arrival(prompt: str, response: str, answer: str, metadata: object) -> float:
    return float(next(ARRIVALS))


ARRIVALS = itertools.count()


def test_the_doctor_finds_a_reward_that_depends_on_who_came_first(tmp_path: Path) -> None:
    reward = [*LENGTHS[1:], "reward.name=tests.e2e.test_equivalence:in_order_of_arrival"]
    code, out, _ = doctor("--equivalence", "quickstart", *SMALL, *reward, shared_cache())
    assert code == 1 and "FAIL" in out
    assert "Not equivalent: colocated, disaggregated" in out


def test_what_the_doctor_says_of_a_failed_run_can_be_read(tmp_path: Path) -> None:
    reward = ("reward.name=tests.support.reward_functions:hopeless", "reward.tag=null", "reward.answer_format=text")
    code, _, err = doctor("--equivalence", "quickstart", *SMALL, *reward, shared_cache())
    assert code == 1 and "a whole step, all failed" in err
    folder = Path(err.split("all reasons are in ")[1].strip().removesuffix("."))
    assert "hopeless" in "".join(path.read_text() for path in folder.iterdir())
    shutil.rmtree(folder.parents[1])


def asking_for_a_stop(prompt: str, response: str, answer: str, metadata: object) -> float:
    if next(ASKED) == 0:
        signal.raise_signal(signal.SIGINT)
    return float(len(response))


ASKED = itertools.count()


def test_a_doctor_that_is_stopped_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reward = [*LENGTHS[1:], "reward.name=tests.e2e.test_equivalence:asking_for_a_stop"]
    code, _, err = doctor("--equivalence", "quickstart", *SMALL, *reward, f"model.cache_dir={tmp_path / 'cache'}")
    assert code == 130, err
    assert [path.name for path in tmp_path.glob("interlace-*")] == []


def test_the_doctor_certifies_nothing_where_nothing_is_learned(tmp_path: Path) -> None:
    reward = ["reward.incorrect=1", "reward.correct=1", "reward.shaping.length_weight=0"]
    code, out, _ = doctor("--equivalence", "quickstart", *SMALL, *reward, shared_cache())
    assert code == 1 and "Not shown: no weight moved" in out


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["schedule=areal"], "no two runs need agree"),
        (["schedule=rollpacker"], "Set schedule.tail=none"),
        (["schedule=verl-fully-async-b"], "Set schedule.batching=step or schedule.sync_every=1"),
        (["schedule.batching=arrival", "schedule.on_straggler=drop"], "Set schedule.on_straggler=hold"),
    ],
)
def test_what_depends_on_speed_is_refused(tmp_path: Path, settings: list[str], sentence: str) -> None:
    code, _, err = doctor("--equivalence", "quickstart", *SMALL, *settings, shared_cache())
    assert code == 2 and sentence in err


def test_a_recipe_without_the_option_is_refused() -> None:
    code, _, err = doctor("quickstart")
    assert code == 2 and "--equivalence" in err
