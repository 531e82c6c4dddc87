"""Log-probs of a teacher with another tokenizer, for the tokens of the student.

The teacher reads the text of a response in its own tokens. Groups of tokens with the same text, the smallest possible
ones, are aligned, and a group's log-prob is the sum over its tokens, as the chunk likelihood of TRL's GOLD trainer
(Patiño et al. 2025). The tokens of a student's group share the difference of the two log-probs equally. So the sum of
the differences over a response is the log-ratio of its text, also when the student has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from interlace.core.types import FloatArray, Prompt, Sample, Segment
from interlace.engines.train.engine import LogprobEngine
from interlace.models.size import context_length
from interlace.models.stop_tokens import find_end_of_turn
from interlace.models.token_text import Chunk, align_tokens, encode_continuation, spell_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from interlace.engines.train.config import TrainConfig


class Tokenizers(NamedTuple):
    """The two tokenizers."""

    student: PreTrainedTokenizerBase
    teacher: PreTrainedTokenizerBase
    spaces_answers: bool = False
    """Flag: the teacher's chat template writes a space before the answers of the assistant."""


class _Translated(NamedTuple):
    """A sample in the teacher's tokens."""

    sample: Sample | None
    """None if no text could be aligned."""
    chunks: Sequence[Chunk]
    """Groups of the student's and of the teacher's tokens."""


class TextTeacherEngine(LogprobEngine):
    """Log-probs of responses of one segment under a teacher with another tokenizer."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: TrainConfig,
        tokenizers: Tokenizers,
        read: Callable[[Prompt], Prompt],
        device: str = "cpu",
    ) -> None:
        """read: returns the prompt in the teacher's tokens."""
        super().__init__(model, config=config, device=device)
        self._tokenizers, self._read = tokenizers, read
        self._context = context_length(model.config)
        self._end_of_turn = find_end_of_turn(tokenizers.teacher)

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Computes [L] log-probs for the student's tokens, in nats.

        A token without aligned text gets the student's own log-prob, from which nothing is learned.
        """
        translated = [self._translate_sample(sample) for sample in samples]
        scored = iter(super().logprobs([each.sample for each in translated if each.sample is not None]))
        found = []
        for sample, each in zip(samples, translated, strict=True):
            logprobs_L = sample.logprobs.astype(np.float32, copy=True)
            teacher = next(scored) if each.sample is not None else None
            for chunk in each.chunks if teacher is not None else ():
                mine = slice(chunk.first_start, chunk.first_end)
                theirs = teacher[chunk.second_start : chunk.second_end].sum()  # type: ignore[index]  # not None
                gap = theirs - logprobs_L[mine].sum()
                logprobs_L[mine] += gap / (chunk.first_end - chunk.first_start)
            found.append(logprobs_L)
        return found

    def _translate_sample(self, sample: Sample) -> _Translated:
        ids, (student, teacher, spaces_answers) = sample.token_ids.tolist(), self._tokenizers
        prompt = self._read(sample.prompt)
        has_end = bool(ids) and ids[-1] in student.all_special_ids
        spelled = spell_tokens(student, ids[:-1] if has_end else ids, after=sample.prompt.token_ids[-1:].tolist())
        after = prompt.token_ids[-1:].tolist()
        if spaces_answers and prompt.messages and not spelled.text.startswith(" "):
            after = []  # as at the start of a text, the teacher's tokenizer adds the space and its decoder removes it
        theirs = self._encode_response(spelled.text, after)
        chunks = list(align_tokens(spelled, spell_tokens(teacher, theirs, after)))
        # The turns of a chat template may end with another token than the texts of the tokenizer, as Gemma's do.
        end = self._end_of_turn if prompt.messages and self._end_of_turn is not None else teacher.eos_token_id
        if has_end and isinstance(end, int):
            chunks.append(Chunk(len(ids) - 1, len(ids), len(theirs), len(theirs) + 1))
            theirs.append(end)
        if self._context is not None:
            room = max(0, self._context - len(prompt.token_ids))
            theirs, chunks = theirs[:room], [chunk for chunk in chunks if chunk.second_end <= room]
        if not chunks:
            return _Translated(None, ())
        segment = Segment(token_ids=np.array(theirs, np.int32), logprobs=np.zeros(len(theirs), np.float32))
        return _Translated(replace(sample, prompt=prompt, segments=(segment,)), chunks)

    def _encode_response(self, text: str, after: Sequence[int]) -> list[int]:
        teacher = self._tokenizers.teacher
        return (
            encode_continuation(teacher, text, after)
            if after
            else list(teacher(text, add_special_tokens=False)["input_ids"])
        )
