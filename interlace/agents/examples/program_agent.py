"""Agent that uses the `openai` package: `python -m interlace.agents.examples.program_agent "12+34"`.

It sends requests to the server at OPENAI_BASE_URL with OPENAI_API_KEY, and prints its answer. `interlace train program`
trains it by changing that address.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam

from interlace.agents.tools.calculator import calculator

TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def answer(question: str, base_url: str | None = None, api_key: str | None = None) -> str:
    """Sends requests until the model answers without a call."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(3):
        message = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            try:
                result = calculator(**json.loads(call.function.arguments))
            except Exception as error:  # noqa: BLE001 - the model reads the error of its call
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def solve(row: Mapping[str, object], base_url: str, api_key: str) -> str:
    """Answers a row of a run with the unchanged script, at the address of the row's session."""
    return answer(str(row["prompt"]), base_url=base_url, api_key=api_key)


if __name__ == "__main__":
    print(answer(sys.argv[1]))  # noqa: T201 - the program's output
