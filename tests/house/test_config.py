"""A setting is defined once, and reading settings loads no heavy library."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

import interlace
from interlace.core.config import Config
from tests.house.source import ROOT

WITHOUT_TORCH = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Refusing())
"""
PARSING = {
    "recipes": """
from interlace.algorithms import algorithm_names
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.load import load_recipe, recipe_names
for name in recipe_names():
    check_settings(load_recipe(name))
for name in algorithm_names():
    load_recipe("quickstart", [f"algorithm={name}"])
""",
    "simulate": """
from interlace.cli.main import app
app("simulate quickstart --profile qwen2.5-7b-h20 steps=1 prompts_per_step=4 minibatches=1".split())
""",
    "presets": "from interlace.cli.main import app; app(['presets'])",
    "a mistake": """
import sys
from interlace.cli.main import app
try:
    app("train quickstart steps=three".split())
except SystemExit as end:
    sys.exit(0 if end.code == 2 else 1)
""",
}
SHARED = {
    "algorithm": "of a recipe, and of a source of a mixture",
    "actor": "a role's place, its granule, its costs and its section",
    "critic": "likewise",
    "env": "likewise; and variables of a tool's process",
    "reference": "likewise",
    "reward": "likewise",
    "rollout": "likewise",
    "world_model": "likewise",
    "max_staleness": "of a schedule, and the bound of a plan, in the same unit",
    "demonstrations": "of a warm-up, and of rows that are generated to train on",
    "experts": "of a warm-up, and of a replay that imitates them alone",
    "camera": "of families whose models have different cameras",
    "devices": "all of a cluster's, and those of a role",
    "model": "of the reference, and of a reward",
    "optimizer": "of each model that is trained",
    "schedule": "of the recipe, and of a learning rate",
    "seed": "of the run, of a data set, of random weights: each may change alone",
    "weights": "how they travel, and what parts of a reward count",
    "temperature": "of training samples, and of evaluation's",
    "chat_template": "of the policy's prompts, and of a reward model's input",
    "heldout_size": "of each kind of source",
    "parameters": "of a data set, and what a part of its mixture changes",
    "gamma": "of each algorithm that discounts",
    "repetition_penalty": "what sampling holds back, and what a reward takes off",
    "kind": "which of several sections this is",
    "high": "the bounds of a ratio, and of a concurrency",
    "low": "likewise",
    "prompts": "of each way to cut a long tail",
    "responses": "likewise",
    "settings": "of a kind of demonstrations, and of a family of environments: each has its own",
    "workers": "processes that score, and those that simulate",
    "name": "of a reward, of an episode, and of a tool",
    "options": "arguments of an episode's class, and of a tool's",
    "timeout_s": "of each thing that may take too long",
    "train_size": "of each kind of source that draws",
    "image_size": "what a simulator draws, and what a policy sees",
    "epochs": "of the run, and of a curriculum's passes over its column",
    "sampler": "of a task and of each source of a mixture; of a flow head; the saved state of one",
    "format": "of a task, and of each source of a mixture",
    "weight": "of a source of a mixture, and of a part of a reward",
    "initial": "of each limit of sequences that learns",
    "floor": "of the adaptive concurrency, and of a sampler's probability",
    "mixture": "of sources, and of datasets of reasoning-gym",
    "heldout": "of each kind of source",
}
"""Fields of one name in several sections, and what each is there."""
MEASURED = ("interlace.forecast.profile.types", "interlace.robots.models.lerobot_folder")
"""Modules whose classes hold measurements, or settings of another program's files, which no recipe sets."""

FOUND_BY_NAME = ("interlace.data.demonstrations.", "interlace.observe.loggers.")
"""Folders of parts: each module has a class of the one name that it is found by."""
MAX_METHODS = 15


def modules() -> Iterator[object]:
    for found in pkgutil.walk_packages(interlace.__path__, "interlace."):
        try:
            yield importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # an adapter to a package that is not installed
            if (error.name or "").startswith("interlace"):
                raise


def classes() -> Iterator[type]:
    for module in modules():
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield value


@pytest.mark.parametrize("what", PARSING)
def test_settings_are_read_without_torch(what: str) -> None:
    code = WITHOUT_TORCH + PARSING[what]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_setting_has_one_home() -> None:
    """Two sections with a field of one name and a default each are one setting with two defaults, or listed."""
    homes: dict[str, set[str]] = defaultdict(set)
    for cls in classes():
        if not issubclass(cls, Config) or cls.__module__ in MEASURED:
            continue
        for name in inspect.get_annotations(cls):
            inherited = any(name in base.model_fields for base in cls.__mro__[1:] if issubclass(base, Config))
            if name in cls.model_fields and not cls.model_fields[name].is_required() and not inherited:
                homes[name].add(cls.__qualname__)
    doubled = {name for name, found in homes.items() if len(found) > 1}
    unlisted = {name: sorted(homes[name]) for name in doubled - set(SHARED)}
    assert not unlisted, f"settings with several homes: {unlisted}"
    assert not set(SHARED) - doubled, f"no longer shared: {set(SHARED) - doubled}"


def test_public_classes_have_names_of_their_own() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for cls in classes():
        if not cls.__name__.startswith("_") and not cls.__module__.startswith(FOUND_BY_NAME):
            homes[cls.__name__].add(cls.__module__)
    doubled = {name: sorted(found) for name, found in homes.items() if len(found) > 1}
    assert not doubled, doubled


def test_classes_are_small() -> None:
    """A class with many public methods is several."""
    counts = {f"{cls.__module__}.{cls.__qualname__}": len(list(public_methods(cls))) for cls in classes()}
    assert {name: n for name, n in counts.items() if n > MAX_METHODS} == {}


def public_methods(cls: type) -> Iterator[str]:
    """Names its own methods; inherited ones and properties, which are values, left out."""
    for name, value in vars(cls).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)):
            yield name
