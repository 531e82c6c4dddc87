"""Checks of a task's sources that read no data."""

import importlib.util
import re
from functools import cache
from pathlib import Path

from interlace.core.errors import UserError, nearest
from interlace.data.config import DataConfig, SourceConfig
from interlace.data.load_sampler import check_samplers

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
