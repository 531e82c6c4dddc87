"""Samplers of prompts by name."""

from collections.abc import Sequence

from interlace.core.config import Config
from interlace.core.plugins import find_class
from interlace.core.random import stable_hash
from interlace.core.types import Prompt
from interlace.data import samplers
from interlace.data.config import DataConfig, SamplerChoice
from interlace.data.mixture import MixtureSampler, SampledSource
from interlace.data.sampling import PromptSampler


def create_sampler(task: DataConfig, prompts: Sequence[Prompt], seed: int) -> PromptSampler:
    """Makes the sampler of a task's training prompts. Raises UserError for an unknown name or setting."""
    if not task.mixture:
        return _create_sampler(task.sampler, prompts, seed)
    parts = []
    for source in task.mixture:
        positions = [place for place, prompt in enumerate(prompts) if prompt.source == source.label]
        own = [prompts[place] for place in positions]
        sampler = _create_sampler(source.sampler, own, stable_hash(seed, "source", source.label))
        parts.append(SampledSource(name=source.label, weight=source.weight, positions=positions, sampler=sampler))
    return MixtureSampler(prompts, seed, parts)


def check_samplers(task: DataConfig) -> None:
    """Raises UserError for an unknown sampler or setting."""
    for choice in _list_choices(task):
        _parse_choice(choice)


def list_learning_samplers(task: DataConfig) -> list[str]:
    """Returns the names of the samplers that read solve rates. Raises UserError as check_samplers()."""
    return [
        choice.name for choice in _list_choices(task) if _parse_choice(choice)[0].observe is not PromptSampler.observe
    ]


def _list_choices(task: DataConfig) -> list[SamplerChoice]:
    return [task.sampler, *(source.sampler for source in task.mixture)]


def _create_sampler(choice: SamplerChoice, prompts: Sequence[Prompt], seed: int) -> PromptSampler:
    kind, settings = _parse_choice(choice)
    return kind(settings, prompts, seed)


def _parse_choice(choice: SamplerChoice) -> tuple[type[PromptSampler], Config]:
    kind = find_class("sampler", samplers, choice.name, PromptSampler)  # type: ignore[type-abstract]
    return kind, kind.Settings.parse(choice.settings, where=f"sampler {choice.name}")
