"""Conversion of engine responses to turns of an episode."""

import numpy as np

from interlace.core.messages import Message, ToolSpec
from interlace.core.progress import Draft
from interlace.core.runs import Runs
from interlace.core.types import Request, Response
from interlace.rollouts.base import OnTurnDraft, Turn, TurnDraft
from interlace.rollouts.rendering.base import Renderer


def pass_draft(
    request: Request, renderer: Renderer | None, tools: tuple[ToolSpec, ...], on_draft: OnTurnDraft, draft: Draft
) -> None:
    """Passes a draft of a turn to its receiver."""

    def read() -> Message:
        if renderer is None:
            return Message(role="assistant", content=draft.text)
        return renderer.begun(draft.token_ids, tools=tools)

    prompt_ids, token_ids = np.asarray(request.prompt_ids, np.int32), draft.token_ids
    on_draft(TurnDraft(prompt_ids=prompt_ids, token_ids=token_ids, text=draft.text, read=read))


def read_turn(number: int, response: Response, renderer: Renderer | None, tools: tuple[ToolSpec, ...]) -> Turn:
    """Converts a response to a turn. renderer: if None, the content of the message is the text."""
    done = response.completion
    if renderer is None:
        message = Message(role="assistant", content=response.text)
    else:
        message = renderer.parse(done.token_ids, prompt_ids=done.request.prompt_ids, tools=tools)
    return Turn(
        number=number,
        prompt_ids=np.asarray(done.request.prompt_ids, np.int32),
        token_ids=np.asarray(done.token_ids, np.int32),
        logprobs=np.asarray(done.logprobs, np.float32),
        versions=Runs.of(done.versions),
        finish_reason=done.finish_reason,
        text=response.text,
        message=message,
        inputs=done.request.inputs,
        num_cached_tokens=done.num_cached_tokens,
        query_ids=np.asarray(done.request.query_ids, np.int32) if done.request.query_ids else None,
    )
