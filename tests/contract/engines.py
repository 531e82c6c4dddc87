"""Factories and reference results for the tests of every rollout engine."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from interlace.core.types import NO_GROUP, Request, Response, SampleKey, SamplingParams
from interlace.engines.rollout.kinds import EngineSite, create_kind, engine_kind
from interlace.engines.rollout.protocol import RolloutEngine, ServiceEngineProtocol
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model

MODEL = ModelConfig(path="tiny:mini")
"""Heads of 32 numbers: the smallest that vLLM serves on a CPU."""
MAX_TOKENS = 2048


def make_engine(name: str, seed: int = 0) -> RolloutEngine:
    """An engine of that name serving MODEL."""
    kind = create_kind(engine_kind(name).Config.parse({"engine": name, "max_running": 8, "max_tokens": MAX_TOKENS}))
    return kind.create(load_model(MODEL), EngineSite(model=MODEL, devices=("cpu",), seed=seed, num_threads=1))


def model_of(seed: int = 0) -> PreTrainedModel:
    """The same model for the engine's weights (seed 0), others for an update."""
    return load_model(MODEL.model_copy(update={"seed": seed})).model


def request(index: int = 0, prompt: Sequence[int] = (5, 6, 7, 8), params: SamplingParams | None = None) -> Request:
    return Request(
        uid="prompt", owner=SampleKey(NO_GROUP, index), prompt_ids=list(prompt),
        params=params or SamplingParams(max_new_tokens=12),
    )  # fmt: skip


def close_engine(engine: RolloutEngine) -> None:
    """Ends the server of an engine that is one."""
    if isinstance(engine, ServiceEngineProtocol):
        engine.close()


def drain(engine: RolloutEngine, num_steps: int = 20000) -> dict[int, Response]:
    """Runs what is live to its end; by the index of the sample."""
    done: dict[int, Response] = {}
    for _ in range(num_steps):
        output = engine.step()
        assert not output.lost, output.lost
        done |= {one.request.owner.index: one for one in output.finished}
        if not output.num_running + output.num_waiting:
            return done
    raise AssertionError(f"requests are live after {num_steps} steps")


def run(engine: RolloutEngine, *requests: Request) -> dict[int, Response]:
    for one in requests:
        engine.submit(one)
    return drain(engine)


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, completion: Response) -> torch.Tensor:
    """[L] of the tokens under the distribution that the request asks for, by one forward of the whole sequence."""
    asked, params = completion.request, completion.request.params
    prompt, made = list(asked.prompt_ids), list(completion.token_ids)
    logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
    rows = [
        _log_distribution(row.clone(), params, prompt + made[:place], made[:place]) for place, row in enumerate(logits)
    ]
    return torch.stack(rows).gather(-1, torch.tensor(made)[:, None])[:, 0]


def _log_distribution(row: torch.Tensor, params: SamplingParams, seen: list[int], made: list[int]) -> torch.Tensor:
    """[vocabulary]: bias, penalties, temperature, then what is cut off, as the terms are defined."""
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in set(seen) if params.repetition_penalty != 1 else ():
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(made) if params.presence_penalty else ():
        row[token] -= params.presence_penalty
    row = row / (params.temperature or 1.0)
    if params.top_k:
        row[row < row.topk(params.top_k).values[-1]] = -torch.inf
    probabilities = row.softmax(-1)
    if params.min_p:
        row[probabilities < params.min_p * probabilities.max()] = -torch.inf
    if params.top_p < 1:
        held, order = row.softmax(-1).sort(descending=True)
        row[order[held.cumsum(-1) - held >= params.top_p]] = -torch.inf
    return row.log_softmax(-1)
