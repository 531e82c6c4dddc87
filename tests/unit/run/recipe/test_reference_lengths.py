"""A reference never reads sequences beyond its context."""

from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.engines.train import LogprobEngine, TrainConfig
from interlace.flows.offline_run import exchange_prompts
from interlace.models.tiny import build_tokenizer
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from tests.unit.engines.train.models import tiny_model

MULTI_TURN = ("model=tiny:micro-chat", "episode=second_guess")


def save_model(folder: Path, context: int, *, chat: bool) -> Path:
    tokenizer = build_tokenizer(context, chat=chat)
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=context).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("context", "changes", "longest"),
    [
        (24, [], 7 + 16),
        (22, [], 7 + 16),
        (48, ["reference.context='The answer is {answer}. '"], 7 + 18 + 16),
        (40, ["reference.context='The answer is {answer}. '"], 7 + 18 + 16),
        (256, [*MULTI_TURN, "rollout.max_tokens=256"], 256),
        (128, [*MULTI_TURN, "rollout.max_tokens=256"], 256),
    ],
)
def test_a_teacher_with_a_short_context_is_refused(
    tmp_path: Path, context: int, changes: list[str], longest: int
) -> None:
    """Before, its log-probs of the places beyond its context were trained on, or the run ended by an IndexError."""
    rows, teacher = tmp_path / "rows.jsonl", save_model(tmp_path / "teacher", context, chat=MULTI_TURN[0] in changes)
    rows.write_text('{"prompt": "7 + 5 =", "answer": "12"}\n')
    given = [f"task={rows}", f"reference.model={teacher}", "warmup=null", "reward=exact"]
    sizes = ["sampling.max_new_tokens=16", "prompts_per_step=2", "minibatches=1", "evaluation.samples_per_prompt=0"]
    recipe = load_recipe("distill", [*given, *sizes, "algorithm={name: distill}", *changes])
    if longest <= context:
        check_recipe(recipe)
        return
    with pytest.raises(UserError, match=rf"up to {longest} tokens .* is {context}\."):
        check_recipe(recipe)


def test_completions_below_exchanged_prompts_fit_the_context() -> None:
    """The reference point of KTO reads the completion of a row below the prompt of another row."""
    short, long = (
        Sample(
            key=SampleKey(0, 0),
            prompt=Prompt(uid=str(size), token_ids=np.arange(1, size + 1, dtype=np.int32), text="", answer=""),
            segments=tuple(Segment(token_ids=np.ones(64 - size, np.int32)) for _ in range(2)),
        )
        for size in (4, 50)
    )
    found = exchange_prompts([short, long], 64)
    assert [[len(segment.token_ids) for segment in sample.segments] for sample in found] == [[14, 14], [14, 14]]
    assert [sample.prompt for sample in found] == [long.prompt, short.prompt]
    engine = LogprobEngine(tiny_model("gpt2"), config=TrainConfig())
    assert [len(logprobs) for logprobs in engine.logprobs(found)] == [28, 28]


def test_a_completion_is_read_below_another_prompt_than_its_own() -> None:
    """The neighbour may have the same prompt, below which the completion would not be mismatched."""
    first, twin, last = (
        Sample(
            key=SampleKey(number, 0),
            prompt=Prompt(uid=str(number), token_ids=np.array([token], np.int32), text="", answer=""),
            segments=(Segment(token_ids=np.array([number], np.int32)),),
        )
        for number, token in enumerate((7, 7, 8))
    )
    found = exchange_prompts([first, twin, last], None)
    assert [sample.prompt.uid for sample in found] == ["2", "2", "0"]
    assert exchange_prompts([first, twin], None) == []
