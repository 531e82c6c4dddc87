"""The vLLM adapter against an engine that answers as vLLM's does."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from interlace.core.types import NO_GROUP, Completion, FinishReason, Request, SampleKey, SamplingParams
from interlace.engines.rollout.vllm import VLLMEngine


class FakeEngine:
    """vllm.LLMEngine: a token a step of each request, as a delta."""

    longest = 100

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
        self.live: dict[str, list[int]] = {}

    @classmethod
    def from_engine_args(cls, arguments: SimpleNamespace) -> "FakeEngine":
        return cls(arguments)

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SimpleNamespace) -> None:
        tokens = prompt["prompt_token_ids"]
        if len(tokens) > self.longest:
            raise ValueError("The decoder prompt is longer than the maximum model length")
        self.live[request_id] = [*range(len(tokens), len(tokens) + params.max_tokens)]

    def abort_request(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self.live.pop(name, None)

    def apply_model(self, function: Any) -> None:
        function(SimpleNamespace(load_weights=list))

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for name, left in list(self.live.items()):
            token = left.pop(0)
            reason = None if left else "length"
            made = SimpleNamespace(
                token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=-0.5)}], finish_reason=reason
            )
            outputs.append(SimpleNamespace(request_id=name, outputs=[made], finished=not left))
            if not left:
                del self.live[name]
        return outputs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VLLMEngine:
    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.LLMEngine, vllm.EngineArgs, vllm.SamplingParams = FakeEngine, SimpleNamespace, SimpleNamespace  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return VLLMEngine("a model")


def request(index: int = 0, length: int = 2) -> Request:
    params = SamplingParams(max_new_tokens=6)
    return Request(uid="a", owner=SampleKey(NO_GROUP, index), prompt_ids=[1] * length, params=params)


def drain(engine: VLLMEngine) -> list[Completion]:
    done: list[Completion] = []
    for _ in range(100):
        output = engine.step()
        done += output.finished
        if not output.num_running:
            return done
    raise AssertionError("requests are live that nobody answers")


@pytest.mark.parametrize("way", ["update", "offload"])
def test_what_runs_goes_on_with_its_tokens(engine: VLLMEngine, way: str) -> None:
    engine.submit(request())
    engine.step()
    engine.step()
    if way == "update":
        engine.update_weights({}, 1, "recompute")
    else:
        engine.offload()
        engine.onload()
    (done,) = drain(engine)
    assert list(done.token_ids) == list(range(2, 8)) and done.finish_reason == FinishReason.LENGTH
    assert list(done.versions) == [0, 0, *[int(way == "update")] * 4]


def test_a_request_that_vllm_refuses_is_not_waited_for(engine: VLLMEngine) -> None:
    with pytest.raises(ValueError, match="maximum model length"):
        engine.submit(request(0, length=101))
    engine.submit(request(1))
    assert [one.request.owner.index for one in drain(engine)] == [1]


def test_no_pass_is_under_way_between_two_steps(engine: VLLMEngine) -> None:
    """What vLLM began before an update would come after it, and carry its version."""
    assert engine._engine.arguments.async_scheduling is False
