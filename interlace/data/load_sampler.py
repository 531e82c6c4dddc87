"""Samplers of prompts by name."""

import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from interlace.core.config import Config
from interlace.core.errors import UserError, nearest
from interlace.core.plugins import find_class
from interlace.core.random import stable_hash
from interlace.core.types import Prompt
from interlace.data import samplers
from interlace.data.config import DataConfig, SamplerChoice, SourceConfig
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


_REGISTERED = re.compile(r"""(?:DATASET_NAME\s*=\s*|register_dataset\(\s*)["'](\w+)["']""")


def check_sources(task: DataConfig) -> None:
    """Raises UserError for an unknown reasoning-gym dataset or sampler, and for limits of a mixture as a whole.

    It imports no data set library.
    """
    if task.mixture and task.max_prompt_tokens is not None:
        raise UserError(
            f"task.max_prompt_tokens={task.max_prompt_tokens}: max_prompt_tokens and overlong of a mixture belong to "
            "each of its sources. Write them there."
        )
    sources: tuple[SourceConfig, ...] = (task, *task.mixture, *task.heldout_sets.values())
    names = {source.reasoning_gym.name for source in sources if source.reasoning_gym is not None}
    for name in sorted(names):
        known = reasoning_gym_names()
        if known and name not in known:
            raise UserError(
                f"unknown reasoning_gym dataset {name!r}.{nearest(name, known)} Rows of your own: task=FILE.jsonl; a "
                "data set of the Hugging Face hub: task=OWNER/NAME."
            )
    check_samplers(task)


@cache
def reasoning_gym_names() -> frozenset[str]:
    """Returns the names of all datasets of reasoning-gym, read from its files: an import takes seconds."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        return frozenset()
    texts = (path.read_text(encoding="utf-8") for path in Path(spec.origin).parent.rglob("*.py"))
    return frozenset(name for text in texts if "register_dataset(" in text for name in _REGISTERED.findall(text))
