"""The forward KL over a teacher's most probable tokens, computed by the engines of both."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.algorithms.losses import clipped_surrogate
from interlace.core.errors import UserError
from interlace.core.training import LossInputs
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.engines.train import LogprobEngine, OptimizerConfig, TrainConfig, TrainEngine
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.load import load_recipe
from tests.unit.algorithms.groups import loss_inputs
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


def log_softmax(model: torch.nn.Module, each: Sample, temperature: float = HEAT) -> torch.Tensor:
    ids = [*each.prompt.token_ids.tolist(), *each.token_ids.tolist()]
    logits = model(torch.tensor([ids])).logits[0]
    return (logits[each.num_prompt_tokens - 1 : -1] / temperature).log_softmax(-1)


SAMPLES = [sample(0, [5, 6, 7]), sample(1, [9, 8, 7, 6, 5])]


def two_models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns teacher and student."""
    torch.manual_seed(0)
    teacher, student = (tiny_model("llama", vocab_size=VOCABULARY) for _ in range(2))
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return teacher, student


@pytest.mark.parametrize("count", [1, 5, VOCABULARY])
def test_loss_and_gradient_equal_the_definition(count: int) -> None:
    samples, (teacher, student) = SAMPLES, two_models()
    with torch.no_grad():
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


def trl_loss(teacher: torch.nn.Module, student: torch.nn.Module, beta: float) -> torch.Tensor:
    """Returns TRL's loss of the samples. beta: 0 for the forward KL, 1 for the reverse KL."""
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    rows = [torch.tensor([*each.prompt.token_ids.tolist(), *each.token_ids.tolist()]) for each in SAMPLES]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100  # the prompts
    stub = SimpleNamespace(teacher_model=teacher, beta=beta, generalized_jsd_loss=trainer.generalized_jsd_loss)
    found: torch.Tensor = trainer.compute_loss(
        stub, student, {"input_ids": ids, "attention_mask": mask, "labels": labels}
    )
    return found


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_the_forward_kl_over_the_vocabulary_is_trls() -> None:
    """The mean over all tokens of the minibatch, with its gradient."""
    teacher, student = two_models()
    expected = trl_loss(teacher, student, beta=0)
    expected.backward()
    wanted = gradients(student)
    student.zero_grad()

    config = TrainConfig(num_top=VOCABULARY)
    found = LogprobEngine(teacher, config=config).top_logprobs(SAMPLES)
    scored = [
        replace(each, ref_logprobs=row[:, 0], teacher_top=row[:, 1:].reshape(len(row), 2, VOCABULARY))
        for each, row in zip(SAMPLES, found, strict=True)
    ]
    algorithm = create_algorithm("distill", {"signal": "top_k", "teacher_top_k": VOCABULARY})
    engine = TrainEngine(student, loss=algorithm.loss, optimizer=OptimizerConfig(), config=config)
    engine.accumulate(scored)
    for name, gradient in gradients(student).items():
        torch.testing.assert_close(gradient / 8, wanted[name], atol=1e-5, rtol=1e-4)
    assert engine.optimizer_step()["actor/loss"] == pytest.approx(float(expected.detach()), abs=1e-5)


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize(
    "settings", [{"signal": "advantage"}, {"signal": "loss"}, {"signal": "loss", "kl_estimator": "k3+"}]
)
def test_the_sampled_reverse_kl_is_trls_in_expectation(settings: dict[str, object], is_stale: bool) -> None:
    """Over all tokens that the sampling policy may sample, each weighted by its probability.

    is_stale: the sampling policy is another than the student, with ratios inside the clip range.
    """
    teacher, student = two_models()
    expected = trl_loss(teacher, student, beta=1)
    expected.backward()
    wanted = gradients(student)
    student.zero_grad()

    algorithm = create_algorithm("distill", settings)
    total, kl = torch.zeros(()), torch.zeros(())
    for each in SAMPLES:
        ours_LV, theirs_LV = log_softmax(student, each, 1.0), log_softmax(teacher, each, 1.0).detach()
        logprobs_T, size = ours_LV.flatten(), ours_LV.numel()
        shift_LV = 0.05 * torch.randn_like(ours_LV) if is_stale else torch.zeros_like(ours_LV)
        behaviour_T = (ours_LV.detach() + shift_LV).log_softmax(-1).flatten()
        outputs = algorithm.loss(
            LossInputs(
                logprobs_T=logprobs_T,
                entropy_T=torch.zeros(size),
                behaviour_logprobs_T=behaviour_T,
                proximal_logprobs_T=behaviour_T,
                advantages_T=torch.zeros(size),
                ref_logprobs_T=theirs_LV.flatten(),
                mask_T=torch.ones(size, dtype=torch.bool),
                sample_T=torch.arange(size),
                num_samples=size,
            )
        )
        total = total + (behaviour_T.exp() * outputs.loss_T).sum() / 8
        kl = kl + (logprobs_T.detach().exp() * outputs.metrics_T["teacher_kl"]).sum() / 8
    total.backward()
    torch.testing.assert_close(kl, expected.detach(), atol=1e-5, rtol=1e-5)
    for name, gradient in gradients(student).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4)


def test_the_weight_of_a_stale_token_is_bounded() -> None:
    inputs = loss_inputs(spread=1.0, with_reference=True)
    assert inputs.ref_logprobs_T is not None
    found_T = create_algorithm("distill", {"signal": "loss", "clip_high": 0.5}).loss(inputs).loss_T
    ratios_T = (inputs.logprobs_T - inputs.behaviour_logprobs_T).exp()
    assert ratios_T.max() > 1.5
    kl_T = (inputs.logprobs_T - inputs.ref_logprobs_T).square() / 2
    advantages_T = clipped_surrogate(ratios_T, inputs.advantages_T, clip_low=0.2, clip_high=0.5).loss_T
    torch.testing.assert_close(found_T - advantages_T, ratios_T.clamp(max=1.5) * kl_T)


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
