"""Rows of SFT, DPO and reward models: read by the loader of prompts, completed, and encoded as samples to train."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from interlace.algorithms.base import RowKind
from interlace.core.errors import UserError
from interlace.core.messages import Message, Messages
from interlace.core.random import keyed_random
from interlace.core.types import BoolArray, Prompt, Sample
from interlace.data.columns import CHAT, CHOSEN, COMPLETION, REJECTED
from interlace.data.config import DataConfig, SourceConfig
from interlace.data.demonstrations.base import Demonstrator
from interlace.data.formatting import Row, read_message
from interlace.data.loading import PromptSet, load_prompts
from interlace.models.token_text import encode_continuation, with_end
from interlace.rollouts.rendering.chat_template import Renderer
from interlace.rollouts.rendering.examples import ExampleWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LABEL = "label"
"""Column of TRL's rows for KTO without pairs: whether the completion is a desired one."""
MARGIN = "margin"
"""Column with the difference of the scores that a pair should have."""
Completion: TypeAlias = str | Messages
"""Text, or the messages that follow the prompt."""
_COLUMNS: Mapping[RowKind, tuple[str, ...]] = {"demonstrations": (COMPLETION,), "pairs": (CHOSEN, REJECTED)}
_RECIPES: Mapping[RowKind, str] = {"demonstrations": "sft", "pairs": "dpo"}


S = TypeVar("S", bound=SourceConfig)


def offline_prompts(task: DataConfig, tokenizer: "PreTrainedTokenizerBase", renderer: Renderer | None) -> PromptSet:
    """Reads the rows of both splits; columns other than the prompt's become metadata. renderer: writes chats."""
    changed = _without_answers(task)
    mixture = tuple(_without_answers(part) for part in task.mixture)
    sets = {name: _without_answers(part) for name, part in task.heldout_sets.items()}
    whole = changed.model_copy(update={"mixture": mixture, "heldout_sets": sets})
    if renderer is None:
        return load_prompts(whole, tokenizer, has_completions=True)

    def write(messages: Messages, row: Row) -> list[int]:
        return renderer.render(messages, row.tools)

    return load_prompts(whole, tokenizer, write, has_completions=True)


def _without_answers(source: S) -> S:
    """Returns a source whose tables need no column `answer`."""
    if source.files is None and source.hub is None:
        return source
    return source.model_copy(update={"columns": {**source.columns, "answer": None}})


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEncoder:
    """Turns prompts with completions into samples to train."""

    kind: RowKind
    tokenizer: "PreTrainedTokenizerBase"
    renderer: Renderer | None
    """Writes completions of chats; None writes text and the end token."""
    demonstrator: Demonstrator | None
    """Writes completions of generated prompts; None takes their answers."""
    scores: Callable[[Prompt, str], list[int]] | None = None
    """Returns the tokens of prompt and completion as a reward model reads them; None for a policy."""

    def encode(self, prompt: Prompt) -> Sample:
        """Returns the sample of a row. Raises UserError for a row of another kind or without a completion."""
        from interlace.engines.train import make_supervised_sample, preference_sample

        if isinstance(prompt.metadata.get(LABEL), bool) and COMPLETION in prompt.metadata:
            raise UserError(
                f"{_name_row(prompt)} has a completion and the column `{LABEL}` with true or false, as rows for KTO "
                "without pairs, which no recipe trains on. Give pairs (interlace train dpo algorithm.loss=kto), or "
                f"keep the rows to imitate and leave the column out: task.omit=[{LABEL}]."
            )
        if self.kind == "demonstrations":
            ids, imitated = self._encode_tokens(prompt, self._read_completion(prompt, COMPLETION))
            sample = make_supervised_sample(prompt.token_ids, ids, _make_mask(imitated))
            return replace(sample, prompt=prompt)
        chosen, rejected = self._read_completion(prompt, CHOSEN), self._read_completion(prompt, REJECTED)
        if chosen == rejected:
            raise UserError(f"{_name_row(prompt)}: `chosen` and `rejected` are equal, so the pair prefers nothing.")
        if self.scores is not None:
            return self._make_scored_pair(prompt, chosen, rejected)
        (mine, own), (theirs, other) = self._encode_tokens(prompt, chosen), self._encode_tokens(prompt, rejected)
        compared = _make_mask(own), _make_mask(other)
        return replace(preference_sample(prompt.token_ids, mine, theirs, compared), prompt=prompt)

    def _make_scored_pair(self, prompt: Prompt, chosen: Completion, rejected: Completion) -> Sample:
        from interlace.engines.train import make_pair_sample

        if self.scores is None or not isinstance(chosen, str) or not isinstance(rejected, str):
            raise UserError(
                f"{_name_row(prompt)}: a reward model scores one answer, and the row has several messages. Give "
                "`chosen` and `rejected` as text."
            )
        end = self.tokenizer.eos_token_id
        margin = self._read_margin(prompt)
        pair = make_pair_sample(self.scores(prompt, chosen), self.scores(prompt, rejected), end_id=end, margin=margin)
        # The tokens that both texts share are the prompt of the sample; text and metadata are from the row.
        return replace(pair, prompt=replace(prompt, token_ids=pair.prompt.token_ids))

    def _read_margin(self, prompt: Prompt) -> float:
        margin = prompt.metadata.get(MARGIN, 0.0)
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            raise UserError(f"{_name_row(prompt)}: column 'margin' is {margin!r:.40}, and a margin is a number.")
        return float(margin)

    def _encode_tokens(self, prompt: Prompt, completion: Completion) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a completion, and a mask of those that the assistant writes."""
        if self.renderer is not None:
            messages = (Message(role="assistant", content=completion),) if isinstance(completion, str) else completion
            writer = ExampleWriter(self.renderer, lambda prompt: tuple(prompt.tools))
            return writer.write(prompt, messages)
        if not isinstance(completion, str):
            raise UserError(
                f"{_name_row(prompt)}: the completion is a list of messages, which only a chat template can write, and "
                "the tokenizer has none. Give text, or take an instruct model or its tokenizer (model.tokenizer)."
            )
        ids = with_end(self.tokenizer, encode_continuation(self.tokenizer, completion))
        return ids, [True] * len(ids)

    def _read_completion(self, prompt: Prompt, column: str) -> Completion:
        """Returns a completion of a row, by the name of its column; of a generated prompt, one that is written."""
        given = prompt.metadata.get(column)
        if given is None and prompt.answer:
            return self._make_completion(prompt, column)
        if given is None:
            raise self._make_refusal(prompt, column)
        if isinstance(given, str) and given:
            return given
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise UserError(f"{_name_row(prompt)}: column {column!r} is {given!r:.40}; it must be text or messages.")
        place = f"{_name_row(prompt)}: column {column!r}, message"
        answers = [item for item in given if isinstance(item, Mapping) and item.get("role") == "assistant"]
        if any(item.get("weight") == 0 for item in answers):
            raise UserError(
                f"{place}s have the weight 0, and all messages of the assistant after the prompt are trained on. Put "
                "those that are only read into the column `prompt`, and leave `weight` out."
            )
        messages = tuple(read_message(item, f"{place} {number}") for number, item in enumerate(given, start=1))
        if messages[0].role != "assistant" or messages[-1].role != "assistant":
            raise UserError(
                f"{place}s of {', '.join(message.role for message in messages)}: a completion begins and ends with a "
                "message of the assistant. Put earlier messages into the column `prompt`."
            )
        is_text = len(messages) == 1 and not messages[0].tool_calls and messages[0].reasoning is None
        return messages[0].content if is_text else messages

    def _make_completion(self, prompt: Prompt, column: str) -> Completion:
        if self.demonstrator is None:
            right: object = prompt.answer
        else:
            right = self.demonstrator.write(prompt, keyed_random("completion", prompt.uid))
        if not isinstance(right, str):
            raise UserError(
                f"task.demonstrations wrote messages for {prompt.uid}, and a generated row needs text. Take another "
                "style."
            )
        return right if column != REJECTED else make_wrong_answer(right, keyed_random("rejected", prompt.uid))

    def _make_refusal(self, prompt: Prompt, column: str) -> UserError:
        """Returns the error for a row without a column: of another kind of rows, or of other names."""
        found = prompt.metadata
        others = [
            kind for kind, names in _COLUMNS.items() if kind != self.kind and all(name in found for name in names)
        ]
        wanted = " and ".join(f"`{name}`" for name in _COLUMNS[self.kind])
        if others:
            recipe = _RECIPES[others[0]]
            return UserError(
                f"{_name_row(prompt)} has {' and '.join(f'`{name}`' for name in _COLUMNS[others[0]])}: it is a row for "
                f"{recipe}, and this recipe trains on {wanted}. Use the recipe {recipe!r} (interlace train {recipe})."
            )
        if column in found:
            return UserError(f"{_name_row(prompt)}: column {column!r} is null. Give a value, or remove the row.")
        chat = found.get(CHAT)
        if self.kind == "demonstrations" and isinstance(chat, list) and isinstance(chat[-1], dict):
            return UserError(
                f"{_name_row(prompt)}: the chat ends with a message of the {chat[-1]['role']}, so there is nothing to "
                "imitate. Add the assistant's message, or a column `completion`."
            )
        columns = ", ".join(found) or "none besides the prompt"
        return UserError(
            f"{_name_row(prompt)} has no column `{column}`, and this recipe trains on {wanted}. It has: {columns}. "
            f"Name the column that has it: task.columns.{column}=COLUMN. Rows of prompts and answers alone are for "
            "reinforcement learning (algorithm=grpo)."
        )


def make_wrong_answer(text: str, rng: Random) -> str:
    """Returns a wrong answer made of a right one: two of its letters or digits change places.

    Words in <tags> stay. If no two differ, the last one is replaced by another digit.
    """
    tags = [range(*found.span()) for found in re.finditer(r"<[^<>]*>", text)]
    places = [place for place, letter in enumerate(text) if letter.isalnum() and not any(place in tag for tag in tags)]
    pairs = [(first, second) for first in places for second in places if first < second and text[first] != text[second]]
    letters = list(text)
    if pairs:
        first, second = rng.choice(pairs)
        letters[first], letters[second] = letters[second], letters[first]
    elif places:
        letters[places[-1]] = rng.choice([digit for digit in "0123456789" if digit != letters[places[-1]]])
    else:
        letters.append("0")
    return "".join(letters)


def _make_mask(is_assistants: Sequence[bool]) -> BoolArray | None:
    """Returns the mask of the tokens that the assistant writes; None if it writes all."""
    return None if all(is_assistants) else np.array(is_assistants, np.bool_)


def _name_row(prompt: Prompt) -> str:
    return f"row {prompt.uid.partition('/')[2] or prompt.uid}"
