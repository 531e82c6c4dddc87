"""The engine has exact log-probs, samples that are independent of the batch, and loses nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from interlace.core.errors import UserError
from interlace.core.types import NO_GROUP, FinishReason, Request, Response, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams

ModelMaker = Callable[[], PreTrainedModel]
PROMPTS = [[1, 2, 3], [4, 5], [7, 8, 9, 10, 11, 12], [4, 5], [90], [3] * 30]


def drain(engine: NativeEngine) -> dict[str, Response]:
    """Steps until nothing runs or waits."""
    done: dict[str, Response] = {}
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
    engine = NativeEngine(make_model(), config=NativeConfig(max_running=4))
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=16))
    assert [len(completion.token_ids) for completion in completions] == [16] * len(PROMPTS)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.finish_reason == FinishReason.LENGTH and completion.versions == (0,) * 16
        expected = teacher_forced(make_model(), prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
    assert completions[1].token_ids != completions[3].token_ids, "two samples of one prompt draw their own noise"


def test_abort_and_resume_continues_bit_for_bit(make_model: ModelMaker) -> None:
    params = SamplingParams(max_new_tokens=24)
    request = Request(uid="a", owner=SampleKey(NO_GROUP, 3), prompt_ids=[5, 6, 7], params=params)
    engine = NativeEngine(make_model(), config=NativeConfig(steps_per_schedule=1))
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
        Request(uid="a", owner=SampleKey(NO_GROUP, 3), prompt_ids=[5, 6, 7], params=params,
                generated_ids=partial.token_ids, generated_logprobs=partial.logprobs,
                generated_versions=partial.versions)
    )  # fmt: skip
    resumed = drain(other)[request.id]
    assert resumed.token_ids == whole.token_ids and resumed.logprobs == whole.logprobs


def test_empty_prompt_is_refused(make_model: ModelMaker) -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        NativeEngine(make_model()).generate([[]], SamplingParams())


def test_tokens_are_counted_while_a_batch_outgrows_its_buffers(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(max_running=100, draft_tokens=0))
    engine.generate([[1, 2]] * 3, SamplingParams(max_new_tokens=20))
    engine.metrics()
    engine.generate([[1, 2]] * 100, SamplingParams(max_new_tokens=20))
    assert engine.metrics()["decode_tokens"] == 100 * 20


@pytest.mark.parametrize("threads", [1, 2])
def test_many_passes_in_one_call_give_the_bits_of_one_after_the_other(make_model: ModelMaker, threads: int) -> None:
    """Raw log-probs need the logits of each pass, which one call over several does not give."""
    params = [
        SamplingParams(max_new_tokens=9 + 6 * index, temperature=index / 3, stop_token_ids=(9, 33)[: index % 3])
        for index in range(len(PROMPTS))
    ]
    singly = [one.model_copy(update={"raw_logprobs": True}) for one in params]
    expected = NativeEngine(make_model()).generate(PROMPTS, singly)
    found = NativeEngine(make_model(), num_threads=threads).generate(PROMPTS, params)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.logprobs, one.versions) == (other.token_ids, other.logprobs, other.versions)
        assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_between_looks_at_the_queue_do_not_change_samples(make_model: ModelMaker, steps: int) -> None:
    params = [SamplingParams(max_new_tokens=3 + 5 * index, stop_token_ids=(9, 33)) for index in range(len(PROMPTS))]
    expected = NativeEngine(make_model()).generate(PROMPTS, params)
    engine = NativeEngine(make_model(), config=NativeConfig(max_running=3, steps_per_schedule=steps))
    found = engine.generate(PROMPTS, params)
    assert [one.logprobs for one in found] == [one.logprobs for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]


def test_an_interruption_ends_the_step_after_one_pass(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(max_running=4))
    for index in range(4):
        engine.submit(
            Request(
                uid="a", owner=SampleKey(NO_GROUP, index), prompt_ids=[1, 2], params=SamplingParams(max_new_tokens=64)
            )
        )
    engine.step()  # the prompts, and maybe more
    engine.interrupt()
    assert engine.step().num_new_tokens == 4
    assert engine.step().num_new_tokens > 4, "it counts once"


@pytest.mark.parametrize(("max_running", "ended"), [(3, [2, 0, 1]), (2, [0])])
def test_sequences_end_in_their_order_and_one_that_waits_gets_the_first_row(
    make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch, max_running: int, ended: list[int]
) -> None:
    """Several steps are one call: past the end of a sequence only where nobody waits for its row."""
    monkeypatch.setattr("interlace.engines.rollout.decode_loop.MAX_LOOK_S", 60.0)
    engine = NativeEngine(make_model(), config=NativeConfig(max_running=max_running, draft_tokens=0))
    for index, length in enumerate((9, 15, 5)):
        params = SamplingParams(max_new_tokens=length)
        engine.submit(Request(uid="a", owner=SampleKey(NO_GROUP, index), prompt_ids=[5, index], params=params))
    assert not engine.step().finished, "prompts"
    assert [completion.request.owner.index for completion in engine.step().finished] == ended


def test_while_a_step_runs_the_next_plan_is_made_and_dropped_when_somebody_comes_or_goes(
    make_model: ModelMaker,
) -> None:
    params = [SamplingParams(max_new_tokens=4 + 3 * index) for index in range(len(PROMPTS))]
    expected = NativeEngine(make_model()).generate(PROMPTS, params)
    for threads in (1, 2):
        engine = NativeEngine(make_model(), config=NativeConfig(steps_per_schedule=1), num_threads=threads)
        done: dict[str, Response] = {}
        planned = 0
        for index, prompt in enumerate(PROMPTS):
            engine.submit(
                Request(uid="generate", owner=SampleKey(NO_GROUP, index), prompt_ids=prompt, params=params[index])
            )
            for _ in range(2):
                done.update((completion.request.id, completion) for completion in engine.step().finished)
                planned += engine.metrics()["planned_ahead"]
        done |= drain(engine)
        planned += engine.metrics()["planned_ahead"]
        assert 5 < planned < 40
        assert [done[one.request.id].logprobs for one in expected] == [one.logprobs for one in expected]


def test_stop_ids_and_stop_strings_end_a_response(make_model: ModelMaker) -> None:
    tokenizer = word_tokenizer()
    engine = NativeEngine(make_model(), tokenizer=tokenizer)
    (free,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=30))
    ids = free.token_ids
    (by_id,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=30, stop_token_ids=(ids[7],)))
    end = ids.index(ids[7]) + 1
    assert by_id.token_ids == ids[:end] and by_id.finish_reason == FinishReason.STOP
    text = f"w{ids[10]} w{ids[11]}"  # over two tokens
    (by_text,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=30, stop=("nothing", text)))
    assert by_text.finish_reason == FinishReason.STOP and by_text.token_ids == ids[: len(by_text.token_ids)]
    assert text in tokenizer.decode(by_text.token_ids) and text not in tokenizer.decode(by_text.token_ids[:-1])


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{token}": token for token in range(96)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_saved_folder_is_served_like_the_model(make_model: ModelMaker, tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    params = SamplingParams(max_new_tokens=8)
    (loaded,), (given,) = (NativeEngine(source).generate([[1, 2]], params) for source in (tmp_path, make_model()))
    assert loaded.logprobs == given.logprobs


def test_metrics_add_up(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(max_running=4))
    engine.metrics()
    engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=10))
    metrics = engine.metrics()
    assert metrics["decode_tokens"] == 20 and metrics["prefill_tokens"] == 3 and metrics["num_running"] == 0
    assert 0 < metrics["attention_s"] < metrics["forward_s"] and metrics["decode_tokens_per_s"] > 0
    assert engine.metrics()["decode_tokens"] == 0, "counted since the last call"
    assert engine.memory().kv_cache > 0 and engine.memory().weights == sum(p.nbytes for p in make_model().parameters())


def test_a_step_tells_how_full_the_store_is_and_who_had_to_leave_it(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(max_running=4, max_tokens=128, draft_tokens=0))
    for index in range(4):
        params = SamplingParams(max_new_tokens=100)
        engine.submit(Request(uid="a", owner=SampleKey(NO_GROUP, index), prompt_ids=[1, 2, 3, index], params=params))
    outputs = [engine.step() for _ in range(80)]
    assert outputs[0].kv_use == 1.0 and all(0 <= output.kv_use <= 1 for output in outputs)
    assert sum(output.num_preemptions for output in outputs) == engine.metrics()["num_preemptions"] > 0
    engine.abort()
    assert engine.step().kv_use == 0


def test_raw_logprobs_are_those_of_the_model_itself(make_model: ModelMaker) -> None:
    params = SamplingParams(
        max_new_tokens=12, temperature=0.5, top_p=0.8, repetition_penalty=1.3, logit_bias=((3, 1.5),), raw_logprobs=True
    )
    engine = NativeEngine(make_model())
    request = Request(uid="a", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1, 2, 3], params=params)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    (partial,) = engine.abort()
    state = {"generated_ids": partial.token_ids, "generated_logprobs": partial.logprobs}
    state |= {"generated_versions": partial.versions, "generated_raw_logprobs": partial.raw_logprobs}
    engine.submit(Request(uid="a", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1, 2, 3], params=params, **state))
    completion = drain(engine)[request.id]
    expected = teacher_forced(make_model(), [1, 2, 3], completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.raw_logprobs), expected, atol=1e-5, rtol=0)
    assert completion.logprobs != completion.raw_logprobs
    assert engine.generate([[1]], SamplingParams(max_new_tokens=2))[0].raw_logprobs == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_run_torch_operations(make_model: ModelMaker, dtype: torch.dtype) -> None:
    engine = NativeEngine(make_model().to(dtype))
    assert "torch sdpa" in engine.report().attention
    # Its rounding hides from a probe what company changes now and then.
    assert dtype == torch.float64 or not engine.report().invariant
    (completion,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))
    expected = teacher_forced(make_model().to(dtype), [1, 2, 3], completion.token_ids).float()
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=tolerance, rtol=0)


def test_half_precision_takes_biases_and_penalties_whole(make_model: ModelMaker) -> None:
    """A bfloat16 next to 30 is 30.125: added to the logits as they come, the second bias would be another."""
    bias = ((5, 30.0), (6, 30.06))
    params = SamplingParams(max_new_tokens=4, temperature=0.01, logit_bias=bias, repetition_penalty=1.0001)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = make_model().to(dtype)
        for parameter in model.parameters():
            parameter.data.zero_()  # all logits are 0
        (completion,) = NativeEngine(model).generate([[1, 2, 3]], params)
        expected = torch.tensor([30.0, 30.06]).div(0.01).log_softmax(-1)
        assert completion.logprobs[0] == pytest.approx(float(expected[completion.token_ids[0] - 5]), abs=1e-2)
