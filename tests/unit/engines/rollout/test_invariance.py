"""A request's tokens and log-probs are bit-equal regardless of concurrent requests and interruptions."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from interlace.core.types import NO_GROUP, Request, Response, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams

Answer = tuple[tuple[int, ...], tuple[float, ...]]
PROMPTS = [[1, 2, 3], [4, 5], [7, 8, 9, 10, 11, 12], [4, 5], [90], [3] * 20, [1, 2, 3], [60, 61, 62, 63]]
PARAMS = [
    SamplingParams(max_new_tokens=20),
    SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.9),
    SamplingParams(max_new_tokens=24, temperature=1.3, top_k=8, min_p=0.02),
    SamplingParams(max_new_tokens=16, temperature=0),
    SamplingParams(max_new_tokens=16, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(max_new_tokens=20, stop_token_ids=(5, 17, 30)),
]


def moe_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, initializer_range=0.1, max_position_embeddings=256,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def request(index: int) -> Request:
    return Request(
        uid=f"p{index % len(PROMPTS)}", owner=SampleKey(NO_GROUP, index), prompt_ids=PROMPTS[index % len(PROMPTS)],
        params=PARAMS[index % len(PARAMS)],
    )  # fmt: skip


def answers(engine: NativeEngine, order: list[int], chaos: random.Random | None = None) -> dict[int, Answer]:
    """Runs requests to the end; with chaos, some wait to be submitted and some are aborted and resumed on the way."""
    waiting, done = [request(index) for index in order], dict[int, Answer]()
    while len(done) < len(order):
        for _ in range(len(waiting) if chaos is None else chaos.randrange(3)):
            if waiting:
                engine.submit(waiting.pop(0))
        if chaos is not None and chaos.random() < 0.2:
            live = [index for index in order if index not in done]
            waiting += [resumed(part) for part in engine.abort([request(chaos.choice(live)).id])]
        for completion in engine.step().finished:
            done[completion.request.owner.index] = (completion.token_ids, completion.logprobs)
    return done


def resumed(partial: Response) -> Request:
    old = partial.request
    return Request(
        uid=old.uid, owner=SampleKey(NO_GROUP, old.owner.index), prompt_ids=old.prompt_ids, params=old.params,
        generated_ids=partial.token_ids, generated_logprobs=partial.logprobs, generated_versions=partial.versions,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["dense", "dense, two threads", "dense, transformers model", "moe", "pages"])
def alone(
    request: pytest.FixtureRequest, tiny: Callable[[], PreTrainedModel]
) -> tuple[Callable[..., NativeEngine], dict[int, Answer]]:
    """A maker of engines, and each request's answer when it is alone in an engine."""
    kind = request.param

    def make(max_running: int = 64, max_tokens: int = 4096, max_batch_tokens: int = 2048) -> NativeEngine:
        config = NativeConfig(
            max_running=max_running,
            max_tokens=max_tokens,
            max_batch_tokens=max_batch_tokens,
            compile_decoder=kind != "dense, transformers model",
            kv="pages" if kind == "pages" else "slots",
            steps_per_schedule=3 if kind == "pages" else 1,
        )
        num_threads = 2 if kind == "dense, two threads" else 1
        return NativeEngine(moe_model() if kind == "moe" else tiny(), config=config, num_threads=num_threads)

    engine = make()
    assert engine.report().invariant, engine.report()
    found: dict[int, Answer] = {}
    for index in range(16):
        found |= answers(engine, [index])
    return make, found


def test_in_one_batch(alone: tuple[Callable[..., NativeEngine], dict[int, Answer]]) -> None:
    make, expected = alone
    assert answers(make(), list(range(16))) == expected


def test_temperature_one_samples_differ_within_a_group(
    alone: tuple[Callable[..., NativeEngine], dict[int, Answer]],
) -> None:
    _, expected = alone
    assert len({tokens for tokens, _ in expected.values()}) > 13


@settings(max_examples=3)
@given(st.integers(0, 2**32), st.permutations(list(range(16))))
def test_in_any_order_with_aborts_and_preemption(
    alone: tuple[Callable[..., NativeEngine], dict[int, Answer]], seed: int, order: list[int]
) -> None:
    make, expected = alone
    chaos = random.Random(seed)
    engine = make(
        max_running=chaos.choice([1, 3, 7, 30]), max_tokens=chaos.choice([64, 160, 1024]), max_batch_tokens=16
    )
    assert answers(engine, order, chaos) == expected


@pytest.mark.slow
def test_at_the_shape_of_a_135m_model() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    engine = NativeEngine(
        LlamaForCausalLM(config), config=NativeConfig(max_running=8, max_tokens=2048, max_batch_tokens=64)
    )
    assert engine.report().invariant, engine.report()
    params = SamplingParams(max_new_tokens=5)
    prompts = [[3, 5, 7, index] for index in range(6)] + [list(range(40))]
    requests = [
        Request(uid="p", owner=SampleKey(NO_GROUP, i), prompt_ids=ids, params=params) for i, ids in enumerate(prompts)
    ]
    single: dict[int, Answer] = {}
    for one in requests:
        engine.submit(one)
        while one.owner.index not in single:
            single |= {c.request.owner.index: (c.token_ids, c.logprobs) for c in engine.step().finished}
    together: dict[int, Answer] = {}
    for one in requests:
        engine.submit(one)
    engine.step()
    for part in engine.abort([requests[2].id]):
        engine.submit(resumed(part))
    while len(together) < len(requests):
        together |= {c.request.owner.index: (c.token_ids, c.logprobs) for c in engine.step().finished}
    assert together == single


@pytest.mark.parametrize("few", [1, 5, 9, 15])
def test_padding_reaches_the_rows_from_which_a_product_gives_equal_bits(
    tiny: Callable[[], PreTrainedModel], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL takes another kernel for few rows: how few differs by machine and shape, so it is set here."""
    product = torch.nn.functional.linear

    def as_mkl_does(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        enough = product(torch.cat([rows, rows.new_zeros(1, 16, rows.shape[-1])], 1), weight, bias)
        made = enough[:, : rows.shape[1]].clone()
        return made * (1 + 2**-20) if rows.shape[1] <= few else made

    monkeypatch.setattr(torch.nn.functional, "linear", as_mkl_does)
    for max_running in (1, 8):
        engine = NativeEngine(tiny(), config=NativeConfig(max_running=max_running, compile_decoder=False))
        padding = next(rows for rows in (4, 8, 16) if rows > few)
        report = engine.report()
        assert report.invariant and report.reason.endswith(f"rows are padded to {padding}"), report
