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
    if renderer is None:
        message = Message(role="assistant", content=response.text)
    else:
        message = renderer.parse(response.token_ids, prompt_ids=response.request.prompt_ids, tools=tools)
    return Turn(
        number=number,
        prompt_ids=np.asarray(response.request.prompt_ids, np.int32),
        token_ids=np.asarray(response.token_ids, np.int32),
        logprobs=np.asarray(response.logprobs, np.float32),
        versions=Runs.of(response.versions),
        finish_reason=response.finish_reason,
        text=response.text,
        message=message,
        inputs=response.request.inputs,
        num_cached_tokens=response.num_cached_tokens,
        query_ids=np.asarray(response.request.query_ids, np.int32) if response.request.query_ids else None,
    )
