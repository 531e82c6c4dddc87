"""Each mistake gives a sentence with the given value and the fix."""

from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import NO_GROUP, Request, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams

ModelMaker = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def engine(tiny: ModelMaker) -> NativeEngine:
    return NativeEngine(tiny(), config=NativeConfig(max_running=4, max_tokens=128))


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ([], SamplingParams(), "prompt is empty"),
        ([1] * 300, SamplingParams(), "context holds 256"),
        ([1] * 100, SamplingParams(max_new_tokens=100), "Raise max_tokens"),
        ([1, 96], SamplingParams(max_new_tokens=4), "token id 96 is not in the model's vocabulary"),
        ([1], SamplingParams(max_new_tokens=4, logit_bias=((10**6, 2.0),)), "token id 1000000"),
        ([1], SamplingParams(max_new_tokens=4, stop=("x",)), "need a tokenizer"),
    ],
)
def test_requests(engine: NativeEngine, prompt: list[int], params: SamplingParams, match: str) -> None:
    with pytest.raises(UserError, match=match):
        engine.generate([prompt], params)
    assert engine.generate([[1]], SamplingParams(max_new_tokens=2))[0].token_ids


def test_negative_temperature() -> None:
    with pytest.raises(ValidationError, match="temperature"):
        SamplingParams(temperature=-1.0)


def test_an_empty_stop_string() -> None:
    """Every response contains it: each would end with its first token."""
    with pytest.raises(ValidationError, match="stop"):
        SamplingParams(stop=("",))


def test_more_stop_tokens_than_an_engine_compares() -> None:
    """Each sampled token of every request is compared with as many ids."""
    SamplingParams(stop_token_ids=tuple(range(256)))
    with pytest.raises(UserError, match=r"stop_token_ids .* must have 256 items or fewer"):
        SamplingParams.parse({"stop_token_ids": range(257)})


def test_resuming_without_logprobs_or_with_nothing_left(engine: NativeEngine) -> None:
    def request(generated: tuple[int, ...], logprobs: tuple[float, ...]) -> Request:
        return Request(
            uid="a", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1], params=SamplingParams(max_new_tokens=2),
            generated_ids=generated, generated_logprobs=logprobs, generated_versions=(0,) * len(generated),
        )  # fmt: skip

    with pytest.raises(UserError, match="one of each a token"):
        engine.submit(request((3,), ()))
    with pytest.raises(UserError, match="nothing to resume"):
        engine.submit(request((3, 4), (-1.0, -1.0)))


def test_a_live_id_twice_and_generate_beside_live_requests(engine: NativeEngine) -> None:
    request = Request(uid="a", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1], params=SamplingParams(max_new_tokens=2))
    engine.submit(request)
    with pytest.raises(ValueError, match="already live"):
        engine.submit(request)
    with pytest.raises(UserError, match="to itself"):
        engine.generate([[1]], SamplingParams())
    engine.abort()
    with pytest.raises(UserError, match="3 prompts but 2"):
        engine.generate([[1]] * 3, [SamplingParams()] * 2)
    engine.pause()
    with pytest.raises(UserError, match="wait for ever"):
        engine.generate([[1]], SamplingParams())
    engine.resume()


def test_unknown_ids_are_ignored_by_abort(engine: NativeEngine) -> None:
    assert engine.abort(["nobody"]) == ()


def test_too_small_a_store(make_model: ModelMaker) -> None:
    with pytest.raises(UserError, match="Raise it"):
        NativeEngine(make_model(), config=NativeConfig(max_tokens=8))


def test_diverged_weights_are_an_error_not_garbage(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model())
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in make_model().named_parameters()}
    engine.update_weights(broken, 1, "recompute")
    with pytest.raises(InterlaceError, match="not finite"):
        engine.generate([[1]], SamplingParams(max_new_tokens=2))


def test_what_was_made_before_weights_diverged_can_be_taken_out(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(steps_per_schedule=2))
    for index in range(3):
        params = SamplingParams(max_new_tokens=40)
        engine.submit(Request(uid="a", owner=SampleKey(NO_GROUP, index), prompt_ids=[1, index], params=params))
    made = sum(engine.step().num_new_tokens for _ in range(3))
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in make_model().named_parameters()}
    engine.update_weights(broken, 1, "keep")
    with pytest.raises(InterlaceError, match="not finite"):
        engine.step()
    assert sum(len(completion.token_ids) for completion in engine.abort()) == made > 0


def test_a_model_without_its_engine_says_so(make_model: ModelMaker) -> None:
    model = make_model()
    engine = NativeEngine(model, config=NativeConfig(compile_decoder=False))
    engine.generate([[1]], SamplingParams(max_new_tokens=2))
    import copy

    with pytest.raises(RuntimeError, match="no rollout engine owns it"):
        copy.deepcopy(model)(torch.tensor([[1, 2]]))


def test_a_model_whose_forward_fails_is_refused_at_load(make_model: ModelMaker) -> None:
    model = make_model()
    model.lm_head.register_forward_hook(lambda module, args, logits: {}["chunk"])
    with pytest.raises(UserError, match=r"cannot generate: .*KeyError"):
        NativeEngine(model)
