"""A session's long context is rendered on a thread; one that cannot fit is refused before rendering."""

import asyncio
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolSpec
from interlace.core.types import JSON, FinishReason, Prompt, Request, Response, Sample, SampleKey
from interlace.rollouts.base import Context, TurnOptions
from interlace.rollouts.context_encoder import LONG_TEXT, is_long
from interlace.rollouts.session import EpisodeSession, SessionLimits
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from tests.support.episode_runs import PARAMS

PROMPT = Prompt(uid="p", token_ids=np.arange(3, dtype=np.int32), text="", answer="")


class Recorder:
    """A renderer that records the thread on which it writes."""

    stop_token_ids = (2,)
    longest_token = 8

    def __init__(self, variables: Mapping[str, JSON] | None = None) -> None:
        self.threads: list[int] = []
        self.variables = dict(variables or {})
        self.variants: list[Recorder] = []

    def variant(self, variables: Mapping[str, JSON]) -> "Recorder":
        self.variants.append(Recorder(variables))
        return self.variants[-1]

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        self.threads.append(threading.get_ident())
        return [5] * len(messages)

    def parse(
        self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        return Message(role="assistant", content="a")


def generate(renderer: Recorder, context: Context, options: TurnOptions = TurnOptions()) -> int:  # noqa: B008 - frozen
    """Makes one turn behind a context. Returns the number of tokens of the context."""

    async def answer(request: Request, **_: object) -> Response:
        return Response(
            request=request, token_ids=[7], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP, text="a"
        )

    async def flow(cluster: Cluster) -> int:
        limits = SessionLimits(renderer=renderer, max_tokens=20_000)
        session = EpisodeSession(cluster, answer, Sample(key=SampleKey(0, 0), prompt=PROMPT), PARAMS, limits)
        session.begin()
        try:
            turn = await session.generate(context, options=options)
        except UserError:
            assert (await session.generate([3, 4])).number == 0, "the refused turn took no number"
            raise
        finally:
            session.close()
        return len(turn.prompt_ids)

    return asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))


def asked(size: int) -> list[Message]:
    return [Message(role="user", content="x" * size)]


def test_a_long_conversation_is_written_on_another_thread() -> None:
    renderer = Recorder()
    assert generate(renderer, asked(LONG_TEXT)) == generate(renderer, asked(5)) == 1
    assert renderer.threads[0] != threading.get_ident() == renderer.threads[1]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        (asked(5), [ToolSpec(name="f", description="", parameters={"properties": {"a": {"enum": ["x"] * 2000}}})]),
        (asked(5), [ToolSpec(name=f"f{place}", description="d" * 100, parameters={}) for place in range(500)]),
        ([Message(role="user", content="")] * 2000, []),
        ([*asked(5), Message(role="assistant", content="", reasoning="r" * LONG_TEXT), *asked(5)], []),
    ],
)
def test_tools_and_thoughts_count_for_the_length(messages: list[Message], tools: list[ToolSpec]) -> None:
    """A request with 20,000 tools was rendered on the event loop, which served no other client meanwhile."""
    assert is_long(messages, tools)
    assert not is_long(asked(5), tools[:1] if len(tools) > 1 else ())


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_written() -> None:
    renderer = Recorder()
    with pytest.raises(UserError, match="has at least 1048576 tokens, and an engine holds 20000"):
        generate(renderer, asked(8 << 20))
    assert not renderer.threads


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([5] * 2_000_000, "has 2000000 tokens, and an engine holds 20000"),
        ([2**40], "ids from 0 to 2147483647"),
        ([2**32 + 5], "ids from 0 to 2147483647"),
        ([2**70], "is not a list of token ids"),
        ([-1], "ids from 0 to 2147483647"),
    ],
)
def test_token_ids_that_no_engine_holds_are_refused(ids: list[int], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        generate(Recorder(), ids)


def test_variables_of_a_turn_reach_the_chat_template() -> None:
    renderer = Recorder()
    generate(renderer, asked(5), TurnOptions(chat_template_kwargs={"enable_thinking": False}))
    assert [one.variables for one in renderer.variants] == [{"enable_thinking": False}] and not renderer.threads
