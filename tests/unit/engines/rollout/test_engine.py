"""The engine's promises: exact log-probs, samples that do not depend on company, nothing lost."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from interlace.core.errors import UserError
from interlace.core.types import Completion, FinishReason, Request
from interlace.engines.rollout import NativeEngine, SamplingParams

ModelMaker = Callable[[], PreTrainedModel]
PROMPTS = [[1, 2, 3], [4, 5], [7, 8, 9, 10, 11, 12], [4, 5], [90], [3] * 30]


def drain(engine: NativeEngine) -> dict[str, Completion]:
    """Steps until nothing runs or waits."""
    done: dict[str, Completion] = {}
    while True:
        output = engine.step()
        done.update((completion.request.id, completion) for completion in output.finished)
        if not output.num_running and not output.num_waiting:
            return done


def teacher_forced(model: PreTrainedModel, prompt: list[int], tokens: tuple[int, ...]) -> torch.Tensor:
    """[len(tokens)] log-probs under temperature 1."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_generate_returns_samples_in_order_with_exact_logprobs(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), max_running=4)
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=16))
    assert [len(completion.token_ids) for completion in completions] == [16] * len(PROMPTS)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.finish_reason == FinishReason.LENGTH and completion.versions == (0,) * 16
        expected = teacher_forced(make_model(), prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
    assert completions[1].token_ids != completions[3].token_ids, "two samples of one prompt draw their own noise"


def test_abort_and_resume_continues_bit_for_bit(make_model: ModelMaker) -> None:
    params = SamplingParams(max_new_tokens=24)
    request = Request(uid="a", sample_index=3, prompt_ids=[5, 6, 7], params=params)
    engine = NativeEngine(make_model())
    engine.submit(request)
    whole = drain(engine)[request.id]
    engine.submit(request)
    for _ in range(3):
        engine.step()
    (partial,) = engine.abort()
    assert partial.finish_reason == FinishReason.ABORTED and 0 < len(partial.token_ids) < 24
    assert partial.token_ids == whole.token_ids[: len(partial.token_ids)]
    other = NativeEngine(make_model())
    other.submit(
        Request(uid="a", sample_index=3, prompt_ids=[5, 6, 7], params=params, generated_ids=partial.token_ids,
                generated_logprobs=partial.logprobs, generated_versions=partial.versions)
    )  # fmt: skip
    resumed = drain(other)[request.id]
    assert resumed.token_ids == whole.token_ids and resumed.logprobs == whole.logprobs


def test_empty_prompt_is_refused(make_model: ModelMaker) -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        NativeEngine(make_model()).generate([[]], SamplingParams())
