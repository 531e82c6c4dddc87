"""Conversion of an engine's tokens to responses and drafts with text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from interlace.core.payload import PayloadStore, StoredColumn
from interlace.core.progress import Draft
from interlace.core.types import Completion, FinishReason, Request, Response, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class _Stream:
    """A request that streams."""

    params: SamplingParams
    num_sent: int = 0
    """Tokens that were returned as drafts."""


class ResponseDecoder:
    """Decodes the tokens of one engine, and tracks the drafts of requests that stream."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_token_ids: Sequence[int],
        *,
        writes_text: bool,
        payloads: PayloadStore | None = None,
        is_first_rank: bool = True,
    ) -> None:
        """stop_token_ids: tokens that end the model's responses. writes_text: False if its answers are not text.

        payloads: keeps the tokens and texts of responses. If None, the responses contain them. is_first_rank: False on
        a rank that shares an engine with the first rank: both finish the same sequences, and only the first responds.
        """
        self._tokenizer, self._writes_text = tokenizer, writes_text
        self._payloads, self._is_first_rank = payloads, is_first_rank
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        added = self._special | set(getattr(tokenizer, "added_tokens_decoder", ()))
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        self._hidden = {getattr(tokenizer, name, None) for name in names} | (added & set(stop_token_ids))
        """Tokens that the text of a response leaves out: the beginning, the end, and padding."""
        self._streams: dict[str, _Stream] = {}
        """Live requests that stream, by id."""

    def begin(self, request: Request) -> None:
        """Records a request that is submitted to the engine."""
        if request.streams:
            self._streams[request.id] = _Stream(request.params)

    def end(self, request: Request) -> None:
        """Records that a request has ended: it gets no more drafts."""
        self._streams.pop(request.id, None)

    def decode(self, completions: Sequence[Completion]) -> tuple[Response, ...]:
        """Makes the responses of requests that have ended."""
        for completion in completions:
            self.end(completion.request)
        return tuple([self._respond(completion) for completion in completions]) if self._is_first_rank else ()

    def _respond(self, completion: Completion) -> Response:
        text = self.decode_text(completion.token_ids, completion.request.params)
        may_stay = completion.request.may_stay and completion.finish_reason != FinishReason.ABORTED
        if self._payloads and may_stay and (stored := self._payloads.put_sample(completion.segments, text)):
            ids, logprobs = (StoredColumn(stored, name) for name in ("token_ids", "logprobs"))
            completion, text = replace(completion, token_ids=ids, logprobs=logprobs, versions=stored.versions), ""
        return Response(completion=completion, text=text, refusal=completion.failure)

    def have_more(self, drawn: Mapping[str, Sequence[int]]) -> bool:
        """Returns whether a request has tokens that no draft contained. drawn: all tokens by the request's id."""
        return any(self._has_new(name, token_ids) for name, token_ids in drawn.items())

    def take_drafts(self, drawn: Mapping[str, Sequence[int]]) -> tuple[Draft, ...]:
        """Makes the drafts of the requests that have more tokens than their last draft. drawn: see have_more()."""
        found = []
        for name, token_ids in drawn.items():
            if self._has_new(name, token_ids):
                stream = self._streams[name]
                stream.num_sent = len(token_ids)
                found.append(
                    Draft(request_id=name, token_ids=token_ids, text=self.decode_text(token_ids, stream.params))
                )
        return tuple(found)

    def decode_text(self, token_ids: Sequence[int], params: SamplingParams) -> str:
        """Decodes a response without the tokens that end or pad it. Other special tokens stay, such as tags."""
        if not self._writes_text:
            return ""
        hidden = self._hidden | (self._special & set(params.stop_token_ids))
        shown = [token for token in token_ids if token not in hidden]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))

    def _has_new(self, name: str, token_ids: Sequence[int]) -> bool:
        stream = self._streams.get(name)
        return stream is not None and len(token_ids) > stream.num_sent


def refuse_request(request: Request, reason: str) -> Response:
    """Makes the response of a request that the engine refuses."""
    nothing = Completion(request=request, token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORTED)
    return Response(completion=nothing, text="", refusal=reason)
