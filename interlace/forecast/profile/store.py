"""Storage of profiles by machine, model and workload, so that each recipe is measured once."""

import json
from pathlib import Path

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.version import VERSION
from interlace.core.yaml_text import read_mapping
from interlace.forecast.profile.profile import device_name, profile_recipe
from interlace.forecast.profile.types import Profile
from interlace.observe.atomic_file import write_atomic
from interlace.observe.progress import ProgressView
from interlace.run.clusters.base import back_end
from interlace.run.recipe.config import Recipe

BUDGET_S = 45.0


def profile_file(recipe: Recipe) -> Path:
    """Returns the path of a recipe's profile on this machine; the file need not exist."""
    devices = back_end(recipe.cluster).find_devices(recipe.cluster)
    task = {"model", "task", "episode", "reward", "algorithm", "warmup", "sampling"}
    measured = {*task, "renderer", "rollout", "actor", "critic", "reference", "weights"}
    sizes = {"prompts_per_step", "samples_per_prompt", "minibatches", "tokens_per_microbatch", "seed"}
    content = recipe.model_dump(mode="json", include=measured | sizes)
    machine = (device_name(devices[0]), len(devices), recipe.cluster.backend, recipe.cluster.threads_per_worker or 0)
    key = stable_hash(VERSION, *machine, json.dumps(content, sort_keys=True))
    return Path(recipe.model.cache_dir).expanduser() / "profiles" / f"{key:016x}.json"


def profile_of(recipe: Recipe, progress: ProgressView) -> Profile:
    """Returns the recipe's profile on this machine. If none is stored, measures and stores one."""
    path = profile_file(recipe)
    if path.exists():
        return Profile.parse(read_mapping(path, remedy="Delete it to measure it again."), where=str(path))
    progress.say(f"measuring what the workers cost here, once; kept as {path}")
    measured = profile_recipe(recipe, progress, source="measured for a plan", budget_s=BUDGET_S)
    keep_profile(recipe, measured)
    return measured


def keep_profile(recipe: Recipe, profile: Profile) -> Path:
    """Stores a recipe's profile on this machine, replacing an older one. Returns its path."""
    path = profile_file(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, profile.model_dump_json(indent=1) + "\n")
    return path


def check_profile(profile: Profile, recipe: Recipe) -> None:
    """Raises UserError if a profile is for another machine or model than the recipe's run on this machine."""
    here = device_name(back_end(recipe.cluster).find_devices(recipe.cluster)[0])
    if profile.basis != "measured" or profile.device != here:
        raise UserError(
            f"the profile is of {profile.label!r}, and this machine has {here!r}: what it predicts would not hold "
            "here. Leave --profile out to have this machine measured, or give --devices to plan for a virtual cluster."
        )
    if profile.model and profile.model != recipe.model.path:
        raise UserError(
            f"the profile is of model {profile.model!r}, and the recipe trains {recipe.model.path!r}. Leave --profile "
            "out to have the recipe measured, or measure it with `interlace profile RECIPE --out profile.json`."
        )
