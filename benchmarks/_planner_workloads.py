"""Workloads of the planner's comparison with measured runs."""

import random
from collections.abc import Mapping, Sequence

from interlace.core.errors import UserError

LANGUAGE: Mapping[str, Sequence[str]] = {
    "quickstart": ("quickstart",),
    "longtail": ("longtail",),
    "quickstart-large": ("quickstart", "prompts_per_step=32", "minibatches=1"),
    "longtail-few": ("longtail", "prompts_per_step=8", "samples_per_prompt=8"),
}
"""Workloads that are measured on each cluster."""
LOCAL: Mapping[str, Sequence[str]] = {
    "calculator": ("calculator", "warmup.until=null"),
    "robot-cartpole": ("robot-cartpole", "steps=100"),
    "robot-pixels": ("robot-pixels",),
    # An untrained teacher takes the same time as a trained one, and needs no run of the recipe sft.
    "distill": ("distill", "reference.model=tiny:micro"),
    "smollm2-lora": ("smollm2-lora",),
}
"""Workloads that are measured locally only."""
RANDOM = "random-"
"""Prefix of a workload that is drawn from the seed after it."""
NAMES = (*LANGUAGE, *LOCAL, f"{RANDOM}0")
POINTS = tuple((cluster, name) for cluster in ("local", "ray") for name in NAMES if cluster == "local" or name in
               ("quickstart", "longtail"))  # fmt: skip
"""The twelve (cluster, workload) of the table."""


def list_words(name: str) -> Sequence[str]:
    """Returns the recipe and the overrides of a workload. Raises UserError for an unknown name."""
    seed = name.removeprefix(RANDOM)
    if name.startswith(RANDOM) and seed.isdecimal():
        return draw_words(int(seed))
    if name not in NAMES:
        raise UserError(f"unknown workload {name!r}: {', '.join(NAMES)}, or {RANDOM}SEED.")
    return {**LANGUAGE, **LOCAL}[name]


def draw_words(seed: int) -> Sequence[str]:
    """Draws a recipe and its sizes; the same seed gives the same workload."""
    chance = random.Random(seed)
    recipe = chance.choice(("quickstart", "longtail"))
    minibatches = chance.choice((1, 2))
    sizes = {
        "prompts_per_step": chance.choice((8, 12, 16, 24)),
        "samples_per_prompt": chance.choice((4, 8, 16)),
        "sampling.max_new_tokens": chance.choice((32, 64, 128)),
        "minibatches": minibatches,
        "tokens_per_microbatch": chance.choice((2048, 4096, 8192)),
    }
    return (recipe, *(f"{key}={value}" for key, value in sizes.items()))
