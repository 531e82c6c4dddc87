"""A model of lm-evaluation-harness whose texts and log-likelihoods come from an engine. Needs interlace[lm-eval].

The requests of the harness: Gao et al., "A framework for few-shot language model evaluation" (Zenodo 10256836).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm  # type: ignore[import-untyped]

from interlace.core.errors import UserError
from interlace.core.tasks import LoopThread
from interlace.core.types import NO_GROUP, Request, SampleKey, SamplingParams
from interlace.engines.rollout.config import KVNeeds, NativeConfig
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.rollout.services.dialects import dialect_named
from interlace.engines.rollout.services.protocol import Address, Delta, EngineClient, ServiceCapacity
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model, load_tokenizer
from interlace.models.size import context_length
from interlace.models.stop_tokens import read_stop_tokens
from interlace.run.recipe.config import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair: TypeAlias = tuple[Any, list[int], list[int]]
"""Key of the harness's cache, tokens of the context, tokens of the continuation."""
T = TypeVar("T")
BATCH = 256
"""Requests that are sent to the engine at once."""
MAX_GEN_TOKS = 256
"""Length of a response in tokens if the task sets none, as in the harness's other models."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
"""Arguments of a task's generation that are sampling parameters of the same name."""


class EngineLM(TemplateLM):  # type: ignore[misc]  # the harness is untyped
    """Model of the harness over the client of an engine: one in this process, or a server."""

    def __init__(
        self,
        client: Callable[[], EngineClient],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop_token_ids: Sequence[int],
        max_length: int | None = None,
    ) -> None:
        """client: opens the client, on a running event loop. stop_token_ids: tokens that end a response. max_length:
        tokens of the longest sequence, if the client does not report it.
        """
        super().__init__()
        self.tokenizer = tokenizer
        self._stop_token_ids = tuple(stop_token_ids)
        self._loop = LoopThread("lm-eval")

        async def connect() -> tuple[EngineClient, ServiceCapacity]:
            opened = client()
            return opened, await opened.capacity()

        self._client, capacity = self._loop.run(connect())
        context = max_length or capacity.context
        if context is None:
            raise UserError(f"{self._client.name} does not report its context length.")
        self.max_length: int = context

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()

    @property
    def eot_token_id(self) -> int:
        found: int = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        """Returns the token before a text that has no context: BOS, else the end token."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(  # house: the signature is the harness's
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **kwargs: Any,  # noqa: ARG002 - the harness's
    ) -> list[int]:
        """Returns the tokens of a text. By default, special tokens are added unless the text begins with BOS."""
        bos = self.tokenizer.bos_token
        begins = bos is not None and string.startswith(str(bos))
        adds = not begins if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer.encode(string, add_special_tokens=adds))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Writes a conversation by the tokenizer's chat template."""
        if not self.tokenizer.chat_template:
            raise UserError("--apply_chat_template: the tokenizer has no chat template. Leave the option out.")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns one response for each request, cut before the first of its stop texts."""
        params = [_sampling_params(request.args[1], self._stop_token_ids) for request in requests]
        prompts = []
        for request, each in zip(requests, params, strict=True):
            room = self.max_length - each.max_new_tokens
            if room < 1:
                raise UserError(
                    f"task {request.task_name}: max_gen_toks = {each.max_new_tokens} leaves no token for the prompt: "
                    f"the model holds {self.max_length}. Lower it: --gen_kwargs max_gen_toks=..."
                )
            prompts.append(self.tok_encode(request.args[0])[-room:])
        texts = []
        for tokens, request, each in zip(
            self._generate(prompts, params, disable_tqdm=disable_tqdm), requests, params, strict=True
        ):
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            for stop in each.stop:
                text = text.partition(stop)[0]
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, in nats: the sum over windows of the model's length."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                pairs.append((None, context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, value in zip(owners, self._score(pairs, disable_tqdm=disable_tqdm), strict=True):
            sums[owner] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(  # house: the signature is the harness's
        self,
        requests: Sequence[Pair],
        disable_tqdm: bool = False,
        **kwargs: Any,  # noqa: ARG002 - the harness's
    ) -> list[tuple[float, bool]]:
        """Returns (log-likelihood in nats, whether greedy decoding gives the continuation) of each request."""
        values = self._score(requests, disable_tqdm=disable_tqdm)
        greedy = self._decode_greedily(requests, disable_tqdm=disable_tqdm)
        found = []
        for (key, context, continuation), value in zip(requests, values, strict=True):
            kept = self._fit(context, continuation)[0]
            answer = (value, greedy[tuple(kept)][: len(continuation)] == list(continuation))
            found.append(answer)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return found

    def _score(self, pairs: Sequence[Pair], *, disable_tqdm: bool) -> list[float]:
        found: list[float] = []
        for chunk in _chunks(pairs, "log-likelihoods", disable_tqdm=disable_tqdm):
            sequences = [[*context, *continuation] for context, continuation in map(self._fit_pair, chunk)]
            each = self._loop.run(self._client.score(sequences))
            found += [sum(logprobs[len(logprobs) - len(pair[2]) :]) for logprobs, pair in zip(each, chunk, strict=True)]
        return found

    def _decode_greedily(self, pairs: Sequence[Pair], *, disable_tqdm: bool) -> dict[tuple[int, ...], list[int]]:
        """Returns the greedy continuation of each context, as long as its longest continuation."""
        lengths: dict[tuple[int, ...], int] = {}
        for context, continuation in map(self._fit_pair, pairs):
            lengths[tuple(context)] = max(len(continuation), lengths.get(tuple(context), 1))
        params = [
            SamplingParams(max_new_tokens=min(length, self.max_length - len(context)), temperature=0)
            for context, length in lengths.items()
        ]
        return dict(zip(lengths, self._generate([*lengths], params, disable_tqdm=disable_tqdm), strict=True))

    def _fit_pair(self, pair: Pair) -> tuple[list[int], list[int]]:
        return self._fit(pair[1], pair[2])

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Removes the first tokens of a context that is too long. Raises UserError if the continuation is too long."""
        room = self.max_length - len(continuation)
        if room < 1:
            raise UserError(
                f"a continuation has {len(continuation)} tokens, and the model holds {self.max_length} in all."
            )
        return context[-room:], continuation

    def _generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, disable_tqdm: bool
    ) -> list[list[int]]:
        requests = [
            Request(uid="lm-eval", owner=SampleKey(NO_GROUP, number), prompt_ids=prompt, params=own)
            for number, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
        found: dict[str, list[int]] = {request.id: [] for request in requests}

        def receive(name: str, delta: Delta) -> None:
            if delta.refusal:
                raise UserError(delta.refusal)
            found[name] += delta.token_ids

        for chunk in _chunks(requests, "responses", disable_tqdm=disable_tqdm):
            self._loop.run(self._client.generate(chunk, receive))
        return [*found.values()]


def open_recipe(recipe: Recipe, *, device: str | None = None) -> EngineLM:
    """Loads the recipe's model into a native engine on one device.

    device: as torch names it. If None, a GPU if the recipe's cluster has one, else the CPU.
    """
    from interlace.engines.rollout.engine import NativeEngine
    from interlace.engines.rollout.services.hosted import HostedEngine
    from interlace.engines.train.place import useful_threads

    place = device or ("cuda" if "cuda" in recipe.cluster.devices else "cpu")
    loaded = load_model(recipe.model)
    try:
        model = loaded.model.to(place)  # type: ignore[arg-type]  # transformers' own stub
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the model cannot be moved to {place!r} ({reason}). Give another one: --device cpu.") from None
    config = recipe.rollout if isinstance(recipe.rollout, NativeConfig) else NativeConfig()
    engine = NativeEngine(
        model,
        config=config,
        tokenizer=loaded.tokenizer,
        seed=recipe.seed,
        num_threads=useful_threads(loaded.model, os.cpu_count() or 1),
        # Scores must not depend on the free memory, so the cache holds the longest sequence or the start fails.
        kv_needs=KVNeeds(longest=create_kind(config).longest_sequence(context_length(model.config))),
    )
    context = min(engine.limits.context, engine.limits.longest)
    capacity = ServiceCapacity(model=recipe.model.path, context=context)
    return EngineLM(lambda: HostedEngine(engine, capacity), loaded.tokenizer, stop_token_ids=loaded.stop_token_ids)


def open_server(address: Address, *, dialect: str = "interlace", tokenizer: str | None = None) -> EngineLM:
    """Connects to a server of engines.

    tokenizer: folder or id of the tokenizer. If None, the model that the server reports. Raises UserError if that is
    not on this machine, and ServiceError if the server does not answer.
    """
    module = dialect_named(dialect)
    path = tokenizer or _find_served_model(address, dialect)
    known = load_tokenizer(ModelConfig(path=path))
    stops = read_stop_tokens(path, known)
    return EngineLM(lambda: module.connect(address, seed=0, own_stops=stops), known, stop_token_ids=stops)


def _find_served_model(address: Address, dialect: str) -> str:
    loop = LoopThread("lm-eval model")

    async def ask() -> str:
        client = dialect_named(dialect).connect(address, seed=0)
        try:
            return (await client.capacity()).model
        finally:
            await client.close()

    try:
        found = loop.run(ask())
    finally:
        loop.close()
    if not found:
        raise UserError(f"{address.url} does not report its model. Name its tokenizer: --tokenizer FOLDER.")
    return found


def _sampling_params(given: Mapping[str, Any], stop_token_ids: Sequence[int]) -> SamplingParams:
    """Returns the sampling parameters of a task's generation. Raises UserError for an argument that no engine has."""
    left = dict(normalize_gen_kwargs(dict(given), default_max_gen_toks=MAX_GEN_TOKS))
    if not left.pop("do_sample", False):  # the harness sets no temperature if the task sets neither
        left["temperature"] = 0.0
    stop = tuple(text for text in left.pop("until", ()) if text)
    limit = int(left.pop("max_gen_toks"))
    values = {name: left.pop(name) for name in _SAMPLING if name in left}
    if left:
        raise UserError(
            f"gen_kwargs {', '.join(sorted(left))}: the engine has no such argument. Known: until, do_sample, "
            f"max_gen_toks, {', '.join(_SAMPLING)}."
        )
    return SamplingParams(max_new_tokens=limit, stop=stop, stop_token_ids=tuple(stop_token_ids), **values)


def _chunks(items: Sequence[T], what: str, *, disable_tqdm: bool) -> Iterator[Sequence[T]]:
    with tqdm(total=len(items), desc=what, disable=disable_tqdm) as bar:
        for start in range(0, len(items), BATCH):
            chunk = items[start : start + BATCH]
            yield chunk
            bar.update(len(chunk))
