"""A user's rollout engine: transformers, one token of each sequence at a time.

cd examples && interlace train quickstart rollout=own_engine:Plain
"""

import torch

from interlace.core.types import FinishReason
from interlace.engines.rollout.external import EngineBackend, ExternalEngine
from interlace.engines.rollout.kinds import EngineKind
from interlace.engines.rollout.live_weights import LiveWeights


class PlainBackend(EngineBackend):
    name = "transformers, one sequence at a time"

    def __init__(self, model, seed):
        self.model, self.weights, self.noise = model, LiveWeights(model), torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def advance(self, live):
        for name, request, made in live.rows():
            params, row = request.params, self.model(torch.tensor([[*request.prompt_ids, *made]])).logits[0, -1]
            logprobs = (row / (params.temperature or 1.0)).log_softmax(-1)
            drawn = torch.multinomial(logprobs.exp(), 1, generator=self.noise) if params.temperature else row.argmax()
            ended = FinishReason.LENGTH if len(made) + 1 == params.max_new_tokens else None
            ended = FinishReason.STOP if int(drawn) in params.stop_token_ids else ended
            yield name, [int(drawn)], [float(logprobs[int(drawn)])], ended

    def swap(self, weights):
        self.weights.update(dict(weights), frozen=False)


class Plain(EngineKind):
    def create(self, loaded, site):
        return ExternalEngine(PlainBackend(loaded.model, site.seed))
