"""Calls from a program: errors advise in Python, and an event loop that runs already is no obstacle."""

import asyncio
import contextvars
import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from interlace.core.errors import InterlaceError

P = ParamSpec("P")
T = TypeVar("T")

ARGUMENTS = (
    "name", "resume", "overwrite", "devices", "schedule", "schedules", "cluster", "profile", "prompts", "timeline",
    "max-staleness", "market", "probe", "explain", "steps", "out", "budget", "roofline", "recipe", "checkpoint", "host",
    "port", "api-key", "admin-key", "policy", "tokenizer", "dialect", "device", "metric", "parallel", "to", "merge",
    "dtype", "step", "quiet",
)  # fmt: skip
"""Options that are arguments of a function here. Options of other programs, such as pip, stay as they are."""
_COMMAND = r"`interlace [^`]*`|interlace presets --explain \S+"
"""Commands, which stay as they are."""
_OPTION = re.compile(_COMMAND + r"|--([a-z][a-z-]*)(?:[= ](?=[\w/~.])([\w.,/~-]+))?")
_TASK = re.compile(
    r"task\.(columns|format)\.(\w+)=(\{?\w+(?:\.\w+)*\}?)|task\.files\.(heldout_size)|task\.omit=\[([^\]]+)\]"
)
"""Settings of the prompts that are arguments of a program."""
_REWARD = re.compile(r"(?<![\w.])reward=([A-Za-z]\w*(?:[.:]\w+)*)")
_LITERALS = {"null": "None", "false": "False", "true": "True"}
_FLAGS = ("overwrite", "resume", "probe", "quiet", "merge", "policy", "explain")


def for_python(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function of the Python API: an option in the message of an error is written as an argument."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except InterlaceError as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (advise(error.args[0]), *error.args[1:])
            error.__notes__ = [advise(note) for note in getattr(error, "__notes__", ())]
            raise

    return call


def in_any_loop(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function that runs an event loop, so that a notebook, whose loop runs already, can call it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return outside_of_loops(functools.partial(function, *args, **kwargs))

    return call


def advise(text: str) -> str:
    """Returns a message with options and prompt settings of the command line as arguments of Python: `resume=True`."""
    text = _REWARD.sub(lambda match: f"reward={_LITERALS.get(match[1]) or _quote(match[1])}", text)
    return _TASK.sub(_format_task, _OPTION.sub(_format_argument, text))


def _format_task(match: "re.Match[str]") -> str:
    section, key, value, heldout_size, omitted = match.groups()
    if heldout_size:
        return str(heldout_size)
    if omitted:
        return f'task={{"omit": [{_quote(omitted)}]}}'
    written = _LITERALS.get(value) or _quote(value)
    return f'columns={{"{key}": {written}}}' if section == "columns" else f'task={{"format": {{"{key}": {written}}}}}'


def _quote(text: str) -> str:
    return f'"{text}"'


def _format_argument(match: "re.Match[str]") -> str:
    if match[1] not in ARGUMENTS:  # None for a command
        return match[0]
    name = match[1].replace("-", "_")
    if name in _FLAGS:
        return f"{name}=True" + (f" {match[2]}" if match[2] else "")
    # A word in small letters after an option in a sentence is not its value, unless a colon follows.
    follows = match.string[match.end() : match.end() + 1]
    if match[2] is None:
        return name if follows == "." else f"{name}=..."
    is_word = match[2].rstrip(".,").isalpha() and match[2].islower()
    is_value = match[0][len(match[1]) + 2] == "=" or follows == ":" or not is_word
    return f"{name}={match[2]}" if is_value else f"{name}=... {match[2]}"


def outside_of_loops(call: Callable[[], T]) -> T:
    """Calls on a separate thread if this thread has an event loop that runs, as in a notebook; else on this thread."""
    if asyncio._get_running_loop() is None:  # the public function raises, and its error would be shown with others
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, call).result()
