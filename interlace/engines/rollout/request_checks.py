"""Checks of a request before an engine accepts it."""

import math
from dataclasses import dataclass

import numpy as np

from interlace.core.errors import UserError
from interlace.core.guide import Guide
from interlace.core.types import Inputs, Request
from interlace.engines.rollout.filters import reshapes_logits, truncates
from interlace.models.inputs import InputEmbedding


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one engine."""

    context: int
    """Positions of the model."""
    longest: int
    """Most tokens of one sequence in the KV store."""
    vocab_size: int
    has_tokenizer: bool = True
    reads: InputEmbedding | None = None
    """Arrays that the model reads in addition to tokens; None if it reads tokens only."""
    num_drawable: int | None = None
    """Number of ids that may be sampled, from 0; None for the whole vocabulary."""
    guide_shape: tuple[int, int] | None = None
    """Shape [K, P] of the guide of a flow-matching answer; None for other heads."""
    needs_queries: bool = False
    """True if the model draws all numbers of an answer at once, from query tokens. Its
    numbers are no token ids, so it cannot continue from them."""

    def check(self, request: Request) -> None:
        """Raises UserError for a request that cannot be served."""
        prompt, params, what = len(request.prompt_ids), request.params, f"request {request.id}"
        if not prompt:
            raise UserError(f"{what}: the prompt is empty. Give it at least one token (a BOS token will do).")
        if prompt >= self.context:
            raise UserError(
                f"{what}: the prompt has {prompt} tokens and the model's context holds {self.context}: nothing can be"
                " generated. Shorten or filter the prompts."
            )
        if min(prompt + params.max_new_tokens, self.context) > self.longest:
            raise UserError(
                f"{what}: {prompt} prompt tokens + max_new_tokens={params.max_new_tokens} do not fit in the KV store,"
                f" which holds {self.longest} for one sequence. Raise max_tokens or lower max_new_tokens."
            )
        done = len(request.generated_ids)
        if not done == len(request.generated_logprobs) == len(request.generated_versions):
            raise UserError(
                f"{what}: {done} generated tokens, {len(request.generated_logprobs)} log-probs and"
                f" {len(request.generated_versions)} versions: a resumed request needs one of each a token."
            )
        if params.raw_logprobs and len(request.generated_raw_logprobs) != done:
            raise UserError(
                f"{what}: it asks for raw log-probs and was given {len(request.generated_raw_logprobs)} for {done}"
                " generated tokens: a resumed request needs one a token, or raw_logprobs off."
            )
        if done >= min(params.max_new_tokens, self.context - prompt):
            raise UserError(f"{what}: it has {done} generated tokens already, its limit: there is nothing to resume.")
        self._check_inputs(request, what)
        if params.stop and not self.has_tokenizer:
            raise UserError(f"{what}: stop strings need a tokenizer: NativeEngine(model, tokenizer=...).")
        drawable = self.num_drawable or self.vocab_size
        forbidden = {token for token, bias in params.logit_bias if bias == -math.inf and token < drawable}
        if len(forbidden) >= drawable:
            raise UserError(f"{what}: logit_bias forbids all {drawable} tokens. Leave at least one without -inf.")
        biased = [token for token, _ in params.logit_bias]
        for tokens in (request.prompt_ids, request.query_ids, request.generated_ids, biased):
            found = np.asarray(tokens)
            if (wrong := found[(found < 0) | (found >= self.vocab_size)]).size:
                raise UserError(f"{what}: token id {wrong[0]} is not in the model's vocabulary of {self.vocab_size}.")

    def _check_inputs(self, request: Request, what: str) -> None:
        if self.needs_queries and not request.query_ids:
            raise UserError(
                f"{what}: the model answers in numbers, which it draws at once from query tokens, and the request has "
                "none. Give query_ids, as the episodes of a robot do."
            )
        if request.query_ids and len(request.query_ids) != request.params.max_new_tokens:
            raise UserError(
                f"{what}: {len(request.query_ids)} queries and max_new_tokens={request.params.max_new_tokens}: all "
                "tokens are drawn at once, so give as many of one as of the other."
            )
        if len(request.prompt_ids) + len(request.query_ids) > self.context:
            raise UserError(
                f"{what}: the prompt and its {len(request.query_ids)} queries are longer than the model's context of "
                f"{self.context}. Shorten the prompt."
            )
        params = request.params
        if self.needs_queries and (reshapes_logits(params) or truncates(params) or params.raw_logprobs):
            raise UserError(
                f"{what}: the model answers in numbers, which take no sampling parameter beyond temperature. Remove "
                "top_p, top_k, min_p, penalties, logit_bias and raw_logprobs."
            )
        if request.guide is not None:
            self._check_guide(request.guide, what)
        if request.inputs is None:
            return
        if self.reads is None:
            raise UserError(f"{what}: it has arrays ({', '.join(request.inputs)}), and the model reads tokens alone.")
        if fault := _find_fault(request, request.inputs, self.reads):
            raise UserError(f"{what}: {fault}")

    def _check_guide(self, guide: Guide, what: str) -> None:
        if self.guide_shape is None:
            raise UserError(f"{what}: it has a guide, which only a flow-matching head follows. Remove it.")
        shapes = (guide.numbers.shape, guide.weights.shape)
        if shapes != (self.guide_shape, self.guide_shape):
            raise UserError(
                f"{what}: its guide has the shapes {list(shapes[0])} and {list(shapes[1])}, and a chunk of the model "
                f"is {list(self.guide_shape)}."
            )


def _find_fault(request: Request, inputs: Inputs, reads: InputEmbedding) -> str | None:
    """Returns the reason why the arrays of a request do not fit the model or the prompt; None if they fit."""
    shapes = reads.shapes
    if set(inputs) != set(shapes):
        return f"it has arrays {sorted(inputs)}, and the model reads {sorted(shapes)}."
    counts = {len(array) for array in inputs.values()}
    for name, array in inputs.items():
        if array.shape[1:] != shapes[name] or len(counts) > 1:
            return f"{name} has shape {list(array.shape)}, and the model reads [N, {str(list(shapes[name]))[1:]}."
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"{name} holds a number that is not finite."
    found = np.count_nonzero(np.asarray(request.prompt_ids) == reads.placeholder)
    wanted = counts.pop() * reads.per_observation
    return None if found == wanted else f"its prompt has {found} placeholder tokens, and its arrays fill {wanted}."
