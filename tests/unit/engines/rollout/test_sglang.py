"""The SGLang adapter against an engine that answers as SGLang's does: streams, aborts, pauses, refusals."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from interlace.core.errors import InterlaceError
from interlace.core.types import NO_GROUP, Completion, FinishReason, Request, SampleKey, SamplingParams
from interlace.engines.rollout.config import SGLangConfig
from interlace.engines.rollout.protocol import ENGINE_PARTS
from interlace.engines.rollout.sglang import SGLangEngine

BROKEN, HALF = 13, 14
"""Prompts whose answer fails, and ends without a reason."""


class FakeManager:
    """The part of SGLang's TokenizerManager and scheduler that the adapter meets."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, SimpleNamespace] = {}
        self.paused: str | None = None

    def abort_request(self, rid: str) -> None:
        if rid in self.rid_to_state:
            self.rid_to_state[rid].aborted = True

    async def pause_generation(self, request: SimpleNamespace) -> None:
        self.paused = request.mode

    async def continue_generation(self, request: SimpleNamespace) -> None:
        self.paused = None

    async def generate(self, rid: str, prompt: Sequence[int], limit: int) -> AsyncIterator[dict[str, Any]]:
        if prompt[0] == BROKEN:
            raise ValueError("The input is longer than the model's context length")
        state = self.rid_to_state[rid] = SimpleNamespace(aborted=False)
        sent: list[tuple[float, int, None]] = []
        reason: str | None = None
        while reason is None:
            await asyncio.sleep(0)
            if self.paused:
                continue
            sent.append((-0.5, len(prompt) + len(sent), None))
            if state.aborted:
                reason, _ = "abort", sent.pop()
            elif len(sent) == limit:
                reason = "length"
            yield {"meta_info": {"output_token_logprobs": [*sent], "finish_reason": reason and {"type": reason}}}
            if prompt[0] == HALF:
                break
        del self.rid_to_state[rid]


class FakeEngine:
    """sglang.Engine."""

    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = FakeManager()
        self.refuses = False
        self.moved: list[str] = []

    async def async_generate(
        self, *, input_ids: Sequence[int], sampling_params: dict[str, Any], rid: str, stream: bool, return_logprob: bool
    ) -> AsyncIterator[dict[str, Any]]:
        assert stream and return_logprob
        return self.tokenizer_manager.generate(rid, input_ids, sampling_params["max_new_tokens"])

    def _flush(self) -> None:
        assert not self.tokenizer_manager.rid_to_state, "Cache flush failed after updating weights"

    def update_weights_from_tensor(self, tensors: object, *, flush_cache: bool = True) -> tuple[bool, str]:
        if self.refuses:
            raise RuntimeError("no such weight")
        if flush_cache:
            self._flush()
        return True, "Success"

    def release_memory_occupation(self, tags: Sequence[str]) -> None:
        self.moved += [f"-{tag}" for tag in tags]
        if "kv_cache" in tags:
            self._flush()

    def resume_memory_occupation(self, tags: Sequence[str]) -> None:
        self.moved += [f"+{tag}" for tag in tags]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SGLangEngine:
    modules = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.managers")}
    modules["sglang"].Engine = FakeEngine  # type: ignore[attr-defined]
    structs = modules["sglang.srt.managers.io_struct"] = ModuleType("io_struct")
    structs.PauseGenerationReqInput = structs.ContinueGenerationReqInput = SimpleNamespace  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SGLangEngine("a model", SGLangConfig(), own_stops=[2])


def request(index: int = 0, prompt: Sequence[int] = (1, 2), most: int = 60) -> Request:
    return Request(
        uid="a", owner=SampleKey(NO_GROUP, index), prompt_ids=list(prompt), params=SamplingParams(max_new_tokens=most)
    )


def drain(engine: SGLangEngine, steps: int = 200) -> list[Completion]:
    done: list[Completion] = []
    for _ in range(steps):
        output = engine.step()
        done += output.finished
        if not output.num_running:
            break
    return done


def test_tokens_arrive_and_a_recomputing_update_tags_those_after_it(engine: SGLangEngine) -> None:
    for index in range(3):
        engine.submit(request(index))
    for _ in range(3):
        engine.step()
    engine.update_weights({"a": torch.zeros(2)}, 1, "recompute")
    done = drain(engine)
    assert len(done) == 3
    for one in done:
        assert list(one.token_ids) == list(range(2, 62)) and one.finish_reason == FinishReason.LENGTH
        assert list(one.versions) == sorted(one.versions) and set(one.versions) == {0, 1}


@pytest.mark.parametrize("prompt", [BROKEN, HALF])
def test_a_request_that_fails_is_an_error_and_not_a_wait(engine: SGLangEngine, prompt: int) -> None:
    engine.submit(request(0, [prompt]))
    with pytest.raises(InterlaceError, match=r"SGLang failed on request a#0#0#-1: (ValueError|EOFError)"):
        drain(engine)
    engine.submit(request(1))
    assert len(drain(engine)) == 1


def test_what_sglang_has_not_heard_of_is_aborted_at_once(engine: SGLangEngine) -> None:
    engine.submit(request(0, most=10**9))
    (aborted,) = engine.abort()
    assert aborted.finish_reason == FinishReason.ABORTED and not aborted.token_ids


def test_a_paused_engine_aborts_too(engine: SGLangEngine) -> None:
    engine.submit(request(0, most=10**9))
    engine.step()
    engine.pause()
    (aborted,) = engine.abort()
    assert aborted.finish_reason == FinishReason.ABORTED and aborted.token_ids
    assert engine.step().num_new_tokens == 0


@pytest.mark.parametrize("way", ["load", "offload"])
def test_what_runs_goes_on_after_the_cache_went(engine: SGLangEngine, way: str, tmp_path: Path) -> None:
    for index in range(2):
        engine.submit(request(index))
    for _ in range(2):
        engine.step()
    if way == "load":
        save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
        engine.load(tmp_path, 1, "recompute")
    else:
        for part in ENGINE_PARTS:
            engine.offload(parts=[part])
        engine.onload(["weights"])
        engine.update_weights({"a": torch.zeros(2)}, 1, "keep")
        assert engine.step().num_new_tokens == 0
        engine.onload()
        assert engine._engine.moved == ["-kv_cache", "-weights", "+weights", "+kv_cache"]
    done = drain(engine)
    assert sorted(one.request.owner.index for one in done) == [0, 1]
    assert all(list(one.token_ids) == list(range(2, 62)) for one in done)


def test_a_refused_update_leaves_the_engine_running(engine: SGLangEngine) -> None:
    engine.submit(request())
    engine.step()
    engine._engine.refuses = True
    with pytest.raises(RuntimeError, match="no such weight"):
        engine.update_weights({"a": torch.zeros(2)}, 1, "keep")
    assert engine.version == 0 and len(drain(engine)) == 1
