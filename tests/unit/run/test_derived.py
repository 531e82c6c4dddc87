"""The table before a run contains the numbers that follow from the settings."""

from interlace.run.derived import derive_numbers
from interlace.run.recipe.check import Derived
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.memory import WorkerMemory
from interlace.schedule.placement import Device


def test_every_number_is_shown_with_what_it_follows_from() -> None:
    recipe = Recipe.parse(
        {
            "model": "tiny:micro",
            "task": "number_sorting",
            "reward": "reasoning_gym",
            "steps": 10,
            "prompts_per_step": 16,
            "samples_per_prompt": 8,
            "minibatches": 2,
            "sampling": {"max_new_tokens": 32},
        }
    )
    device = Device(index=0, pool="cpu", pool_index=0, memory_bytes=2**30)
    worker = WorkerMemory(
        worker="actor/0", devices=(device,), num_bytes=3 * 2**20, how="weights", transient_bytes=5 * 2**20
    )
    derived = Derived(
        num_parameters=213_824,
        num_train_prompts=4096,
        num_heldout_prompts=256,
        max_prompt_tokens=8,
        samples_per_step=128,
        samples_per_minibatch=64,
        max_tokens_per_step=5120,
        num_updates=20,
        num_versions=10,
        staleness_bound=1,
        steps_ahead=2.0,
        memory=(worker,),
    )
    rows = {row.name: (row.value, row.how) for row in derive_numbers(recipe, derived)}
    sft = Recipe.parse(
        {"model": "tiny:micro", "task": "rows.jsonl", "algorithm": "sft", "steps": 1, "prompts_per_step": 2}
    )
    assert "<= 8 tokens a row" in [row.how for row in derive_numbers(sft, derived)]
    assert rows == {
        "parameters": ("214k", "tiny:micro"),
        "prompts": ("4.1k", "256 more are held out"),
        "samples a step": ("128", "16 x 8"),
        "samples a minibatch": ("64", "128 / 2"),
        "tokens a step": ("<= 5.1k", "<= 8 + 32 tokens a sample"),
        "optimizer updates": ("20", "10 steps"),
        "versions": ("10", "schedule verl-colocated"),
        "staleness": ("<= 1 versions", "generation at most 2 steps ahead, 256 samples"),
        "actor/0": ("3 MiB", "on cpu:0: weights; about 5 MiB more while it computes"),
    }
