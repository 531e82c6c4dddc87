"""A request that is too large, or has too many mistakes, is refused at once and in a short message."""

import random
import time

import pytest
from pydantic import ValidationError

from interlace.agents.server import body
from interlace.agents.server.ask import check_tools
from interlace.agents.server.body import ApiError, Body
from interlace.agents.server.requests import (
    ChatRequest,
    CompletionRequest,
    CountRequest,
    GenerateRequest,
    RequestModel,
    ResponsesRequest,
)
from interlace.core.messages import ToolSpec
from interlace.core.types import JSON
from interlace.rollouts.rendering.parsers.base import open_end

CHAT: dict[str, JSON] = {"messages": [{"role": "user", "content": "hi"}]}
MANY = 20_000
"""Entries of a request that is too large. The body of a real one may have millions."""
FIELDS: dict[str, JSON] = {f"field{place}": 1 for place in range(MANY)}


@pytest.mark.parametrize(
    ("model", "fields", "named"),
    [
        (GenerateRequest, {"token_ids": [""] * MANY}, "token_ids"),
        (ChatRequest, {"messages": [1] * MANY}, "messages"),
        (ResponsesRequest, {"input": [1] * MANY}, "input"),
        (ResponsesRequest, {"input": "hi", "tools": [1] * MANY}, "tools"),
        (CountRequest, {"messages": [1] * MANY}, "messages"),
        (CountRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}, "content"),
        (CompletionRequest, {"prompt": "hi", "stop": [1] * MANY}, "stop"),
        (CompletionRequest, {"prompt": "hi", "stop_token_ids": [""] * MANY}, "stop_token_ids"),
        (CompletionRequest, {"prompt": "hi", "logit_bias": {str(token): "" for token in range(1 << 17)}}, "logit_bias"),
        (CompletionRequest, {"prompt": "hi", **FIELDS}, "the body"),
        (ChatRequest, {**CHAT, "chat_template_kwargs": FIELDS}, "chat_template_kwargs"),
        (ChatRequest, {**CHAT, "stream_options": FIELDS}, "stream_options"),
    ],
)  # fmt: skip
def test_a_request_of_many_mistakes_is_refused_at_the_first(
    model: type[RequestModel], fields: dict[str, JSON], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pydantic kept one error for each entry: a body of 32 MiB took more memory than the machine has."""
    found: list[ValidationError] = []
    first_mistake = body._first_mistake
    monkeypatch.setattr(body, "_first_mistake", lambda error, kind: found.append(error) or first_mistake(error, kind))
    with pytest.raises(ApiError, match=named):
        Body(fields).read(model)
    assert found[0].error_count() < 10


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": [f"stop {place}" for place in range(2000)]},
        {"stop": "x" * 10_000},
        {"stop": [f"{place}" + "x" * 8000 for place in range(20)]},
        {"stop_token_ids": [5] * 2000},
        {"model": "m" * 10_000},
        {"temperature": "t" * 100_000},
        {"f" * 100_000: 1},
    ],
)
def test_a_large_value_is_refused_in_a_short_message(fields: dict[str, JSON]) -> None:
    """An engine searched for each stop text after each token, and a stream repeated the name in each event."""
    with pytest.raises(ApiError) as found:
        Body({"prompt": "hi", **fields}).read(CompletionRequest)
    assert found.value.status == 400 and len(str(found.value)) < 3000


def test_the_beginning_of_a_stop_text_at_the_end_of_a_stream_is_found_at_once() -> None:
    """At each token, the end of the text was compared with each beginning of each stop text."""
    for number in range(300):
        rng = random.Random(number)
        text, *tags = ("".join(rng.choices("ab", k=rng.randint(1, 9))) for _ in range(3))
        sizes = [size for tag in tags for size in range(1, len(tag)) if text.endswith(tag[:size])]
        assert open_end(text, tags) == max(sizes, default=0), (text, tags)
    stops, start_s = [f"{place:04d}" + "x" * 60 for place in range(1000)], time.process_time()
    for _ in range(300):
        assert open_end("y" * 2000, stops) == 0
    assert time.process_time() - start_s < 1.5


def test_equal_names_among_many_tools_are_found_at_once() -> None:
    tools = [ToolSpec(name=f"tool{place}", description="", parameters={}) for place in range(50_000)]
    start_s = time.process_time()
    assert len(check_tools(tools)) == len(tools)
    assert time.process_time() - start_s < 5.0, "the time was quadratic: minutes"
    with pytest.raises(ApiError, match="two tools have the name 'tool7'"):
        check_tools([*tools, tools[7]])
