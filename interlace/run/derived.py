"""Numbers that follow from a recipe's settings, as shown before a run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interlace.observe.progress import short
from interlace.observe.tables import DerivedNumber
from interlace.run.recipe.config import Recipe, is_offline

if TYPE_CHECKING:
    from interlace.run.recipe.check import Derived


def derive_numbers(recipe: "Recipe", derived: "Derived") -> list[DerivedNumber]:
    """Returns the rows of the table."""
    return [*_list_counts(recipe, derived), *_list_memory(derived)]


def list_prompt_notices(recipe: "Recipe", derived: "Derived") -> Iterator[str]:
    """Returns the sentences on prompts that a run does not train on, or uses more than once in a step."""
    if derived.num_dropped_prompts:
        yield f"{derived.num_dropped_prompts} prompts have more than task.max_prompt_tokens tokens and were dropped."
    if recipe.prompts_per_step > derived.num_train_prompts:
        yield (
            f"prompts_per_step={recipe.prompts_per_step}, and there are {derived.num_train_prompts} prompts to train "
            f"on: a step uses each about {recipe.prompts_per_step / derived.num_train_prompts:.1f} times."
        )


def _list_counts(recipe: "Recipe", derived: "Derived") -> Iterator[DerivedNumber]:
    prompts, samples = recipe.prompts_per_step, recipe.samples_per_prompt
    longest = f"{derived.max_prompt_tokens} + {recipe.sampling.max_new_tokens} tokens a sample"
    if is_offline(recipe):  # the longest prompt with its completion
        longest = f"{derived.max_prompt_tokens} tokens a row"
    yield DerivedNumber(name="parameters", value=short(derived.num_parameters), how=recipe.model.path)
    if derived.num_lora_parameters is not None:
        share = derived.num_lora_parameters / derived.num_parameters
        trained = short(derived.num_lora_parameters)
        yield DerivedNumber(name="trained parameters", value=trained, how=f"adapter, {share:.1%} beside the model's")
    yield DerivedNumber(
        name="prompts", value=short(derived.num_train_prompts), how=f"{derived.num_heldout_prompts} more are held out"
    )
    yield DerivedNumber(name="samples a step", value=str(derived.samples_per_step), how=f"{prompts} x {samples}")
    yield DerivedNumber(
        name="samples a minibatch",
        value=str(derived.samples_per_minibatch),
        how=f"{derived.samples_per_step} / {recipe.minibatches}",
    )
    yield DerivedNumber(name="tokens a step", value=f"<= {short(derived.max_tokens_per_step)}", how=f"<= {longest}")
    yield DerivedNumber(name="optimizer updates", value=str(derived.num_updates), how=f"{recipe.steps} steps")
    yield DerivedNumber(name="versions", value=str(derived.num_versions), how=f"schedule {recipe.schedule.preset}")
    ahead = derived.steps_ahead  # in the units of other systems' limits
    yield DerivedNumber(
        name="staleness",
        value=f"<= {derived.staleness_bound} versions" if derived.staleness_bound else "0",
        how=f"generation at most {ahead:g} steps ahead, {round(ahead * derived.samples_per_step)} samples"
        if ahead
        else "generation waits for training",
    )


def _list_memory(derived: "Derived") -> Iterator[DerivedNumber]:
    for worker in derived.memory:
        devices = ", ".join(device.name for device in worker.devices)
        passing = ""
        if worker.transient_bytes:
            passing = f"; about {worker.transient_bytes / 2**20:,.0f} MiB more while it computes"
        if worker.idle_bytes:
            passing += f", when {worker.idle_bytes / 2**20:,.0f} MiB (moments) may be off"
        yield DerivedNumber(
            name=worker.worker, value=f"{worker.num_bytes / 2**20:,.0f} MiB", how=f"on {devices}: {worker.how}{passing}"
        )
