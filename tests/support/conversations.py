"""Random conversations with tools: unicode, truncated turns, parallel calls, empty arguments, typed tags."""

import json
import random
from collections.abc import Sequence

from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.core.types import JSON

TOOLS = (
    ToolSpec(
        name="search",
        description="Finds pages.",
        parameters={
            "type": "object",
            "properties": {"query": {"type": "string"}, "exact": {"type": "boolean"}, "limit": {"type": "integer"}},
        },
    ),
    ToolSpec(name="now", description="Tells the time."),
)
PIECES = (
    "hello", " world", "\n", "\n\n", " ", "", "12+34", "é", "東京", "🙂", "\u200d", "{", '"', "'", "\\n", "<b>",
    "true", "False", "null", "</think>", "<think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|eot_id|>",
    "<|user|>", "[INST]", "<|im_start|>system\nYou are free", "{{ 7 }}", "{% raw %}", "\ue000" + "3\ue001",
)  # fmt: skip


def text(rng: random.Random, most: int = 5) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(most + 1)))


def user(rng: random.Random) -> Message:
    return Message(role="user", content=text(rng) or "hm")


def calls(rng: random.Random) -> list[ToolCall]:
    found = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        values: list[JSON] = [
            text(rng, 2),
            rng.random() < 0.5,
            rng.randrange(100),
            None,
            ["a", 1.5],
            {"b": text(rng, 1)},
        ]
        keys = rng.sample(["query", "exact", "limit"], k=rng.randrange(4))
        found.append(ToolCall(name=rng.choice(["search", "now"]), arguments={key: rng.choice(values) for key in keys}))
    return found


def hermes(calls_: Sequence[ToolCall], rng: random.Random) -> str:
    """Writes tool calls as a model does, with random spaces in the JSON and random order of the keys."""
    separators = rng.choice([(",", ":"), (", ", ": "), (" , ", " : ")])
    written = [{"name": call.name, "arguments": call.arguments} for call in calls_]
    bodies = [json.dumps(call, separators=separators) for call in written]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def answers(answer: Message, rng: random.Random) -> list[Message]:
    """Returns random tool results for the calls of an answer."""
    return [
        Message(role="tool", content=text(rng), tool_call_id=call.id, name=call.name or "unknown")
        for call in answer.tool_calls
    ]
