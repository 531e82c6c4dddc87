"""Text completions of several prompts over HTTP."""

import pytest

from interlace.core.messages import Message
from tests.support.scripted_session import ScriptedSession
from tests.unit.agents.server.test_server import Client, served


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_prompts_have_their_choices_in_order(is_stream: bool) -> None:
    texts = ["a", "b", "c", "d"]
    session = ScriptedSession([Message(role="assistant", content=text) for text in texts])
    ask = {"model": "any", "prompt": [[1, 2], [3]], "n": 2, "return_token_ids": True, "stream": is_stream}

    async def use(client: Client) -> None:
        if is_stream:
            ask["stream_options"] = {"include_usage": True}
            found = [data for _, data in await client.events("/v1/completions", ask)][:-1]
            choices, usage = [choice for event in found for choice in event["choices"]], found[-1]["usage"]
        else:
            found = await client.post("/v1/completions", ask)
            choices, usage = found["choices"], found["usage"]
        assert ["".join(each["text"] for each in choices if each["index"] == place) for place in range(4)] == texts
        assert [context for context, _, _ in session.asked] == [[1, 2], [1, 2], [3], [3]]
        assert usage["prompt_tokens"] == 2 * 5, "each prompt counts once"
        assert all("prompt_token_ids" in choice for choice in choices if choice.get("finish_reason"))

    served(session, use)
