"""The forward KL over a teacher's most probable tokens, computed by the engines of both."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.core.errors import UserError
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.engines.train import LogprobEngine, OptimizerConfig, TrainConfig, TrainEngine
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.load import load_recipe
from tests.unit.engines.train.models import tiny_model

VOCABULARY = 48
HEAT = 0.8


def sample(index: int, ids: list[int]) -> Sample:
    zeros = np.zeros(len(ids), np.float32)
    return Sample(
        key=SampleKey(index, 0),
        prompt=Prompt(uid=str(index), token_ids=np.array([3, 4 + index], np.int32), text="", answer=""),
        segments=(Segment(token_ids=np.array(ids, np.int32), logprobs=zeros - 1),),
        advantages=zeros,
    )


def log_softmax(model: torch.nn.Module, each: Sample) -> torch.Tensor:
    ids = [*each.prompt.token_ids.tolist(), *each.token_ids.tolist()]
    logits = model(torch.tensor([ids])).logits[0]
    return (logits[each.num_prompt_tokens - 1 : -1] / HEAT).log_softmax(-1)


@pytest.mark.parametrize("count", [1, 5, VOCABULARY])
def test_loss_and_gradient_equal_the_definition(count: int) -> None:
    samples = [sample(0, [5, 6, 7]), sample(1, [9, 8, 7, 6, 5])]
    torch.manual_seed(0)
    teacher, student = (tiny_model("llama", vocab_size=VOCABULARY) for _ in range(2))
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
        wanted = [log_softmax(teacher, each) for each in samples]
    total = torch.zeros(())
    for each, theirs in zip(samples, wanted, strict=True):
        ours = log_softmax(student, each)
        top, ids = theirs.topk(count, -1)
        mine = ours.gather(-1, ids)
        kl = (top.exp() * (top - mine)).sum(-1)
        if count < VOCABULARY:
            rest, mine_rest = 1 - top.exp().sum(-1), 1 - mine.exp().sum(-1)
            kl = kl + rest * (rest / mine_rest).log()
        else:
            torch.testing.assert_close(kl, (theirs.exp() * (theirs - ours)).sum(-1))
        total = total + kl.sum()
    total.backward()
    expected = {name: weight.grad.clone() for name, weight in student.named_parameters() if weight.grad is not None}
    student.zero_grad()

    config = TrainConfig(temperature=HEAT, num_top=count)
    found = LogprobEngine(teacher, config=config).top_logprobs(samples)
    scored = [
        replace(each, ref_logprobs=row[:, 0], teacher_top=row[:, 1:].reshape(len(row), 2, count))
        for each, row in zip(samples, found, strict=True)
    ]
    algorithm = create_algorithm("distill", {"signal": "top_k", "teacher_top_k": count})
    engine = TrainEngine(student, loss=algorithm.loss, optimizer=OptimizerConfig(lr=1e-3), config=config)
    engine.accumulate(scored)
    grads = {name: weight.grad for name, weight in student.named_parameters() if weight.grad is not None}
    for name, gradient in expected.items():
        torch.testing.assert_close(grads[name], gradient, atol=2e-5, rtol=1e-3)
    metrics = engine.optimizer_step()
    assert metrics["actor/teacher_forward_kl"] == pytest.approx(float(total.detach()) / 8, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("reference.ensemble=[tiny:micro]", "reference.ensemble"),
        ("reference.align=text", "reference.align=text"),
        ("actor.tensor_parallel=2", "actor.tensor_parallel"),
    ],
)
def test_what_does_not_work_with_the_most_probable_tokens(change: str, key: str) -> None:
    recipe = load_recipe("distill", ["algorithm.signal=top_k", change, "actor.ranks=2"])
    with pytest.raises(UserError, match=f"does not work with {key}"):
        check_settings(recipe)
