"""Published flow-matching policies (SmolVLA, pi0, pi0.5) as policies of the server."""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from interlace.core.errors import UserError, first_line
from interlace.core.guide import Guide
from interlace.core.types import FloatArray
from interlace.robots.models.flow_vla import FlowVLAPolicy, Sensed, load_flow_vla
from interlace.robots.models.lerobot_folder import CONFIG, KINDS, STATE
from interlace.robots.serving.policy import PICTURE_UNITS
from interlace.robots.serving.prefix import commit_prefix, make_guide
from interlace.robots.serving.schema import ANY, ActRequest, ArrayField, PolicySchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST_BATCH = 8
"""Requests of one forward pass."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def is_published_policy(path: Path) -> bool:
    """Returns whether a folder has the configuration of a flow-matching policy of LeRobot."""
    file = path / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("type") in KINDS


class RequestBatches:
    """Computes all requests that wait at one time in one call. Used within one event loop."""

    def __init__(self, compute: Callable[[Sequence[ActRequest]], Sequence[FloatArray]], *, most: int) -> None:
        """compute: returns an answer for each request. most: requests of a call."""
        self._compute, self._most = compute, most
        self._waiting: list[tuple[ActRequest, asyncio.Future[FloatArray]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._task: asyncio.Task[None] | None = None

    async def ask(self, request: ActRequest) -> FloatArray:
        """Returns the answer to a request. Raises the error of its call."""
        future: asyncio.Future[FloatArray] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await future

    def close(self) -> None:
        """Ends the thread after its current call."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            batch = [(request, future) for request, future in batch if not future.done()]  # the others have gone
            if batch:
                await self._run_batch([request for request, _ in batch], [future for _, future in batch])

    async def _run_batch(self, requests: Sequence[ActRequest], futures: Sequence["asyncio.Future[FloatArray]"]) -> None:
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, requests)
        except Exception as error:  # noqa: BLE001 - the robot gets it, and the server continues
            if len(requests) > 1:  # one of them may have failed the call of all
                for request, future in zip(requests, futures, strict=True):
                    await self._run_batch([request], [future])
            elif not futures[0].done():
                futures[0].set_exception(error)
            return
        for future, answer in zip(futures, answers, strict=True):
            if not future.done():
                future.set_result(answer)


class PublishedPolicy:
    """A published policy. Its chunk begins with noise of a fixed seed, or of a new seed for each request."""

    def __init__(self, path: Path, control_hz: float, *, samples: bool) -> None:
        """control_hz: actions per second, which the schema states. samples: True for new noise.

        Raises UserError if the folder is not a complete policy: weights, statistics and tokenizer.
        """
        tokenizer = _load_tokenizer(path)
        self._policy = FlowVLAPolicy(load_flow_vla(path), tokenizer)
        self._samples = samples
        self._batches = RequestBatches(self._compute, most=LARGEST_BATCH)
        folder = self._policy.folder
        [state_size] = folder.settings["input_features"][STATE]["shape"]
        units = "as in the policy's data set"
        self.schema = PolicySchema(
            policy=str(path),
            observation={
                "state": ArrayField(shape=(int(state_size),), dtype="float32", units=units),
                **{
                    camera: ArrayField(shape=(ANY, ANY, 3), dtype="uint8", units=PICTURE_UNITS)
                    for camera in folder.cameras
                },
            },
            actions=ArrayField(shape=(folder.schedule.chunk, folder.schedule.size), dtype="float32", units=units),
            control_hz=control_hz,
            executed=min(folder.executed, folder.schedule.chunk),
            prefix_rule="guided",
        )

    async def act(self, request: ActRequest) -> FloatArray:
        chunk = await self._batches.ask(request)
        return commit_prefix(chunk, request.prefix, request.delay)

    def close(self) -> None:
        """Ends the thread of the forward passes."""
        self._batches.close()

    def _prepare(self, request: ActRequest) -> tuple[Sensed, FloatArray, Guide | None]:
        """Returns the inputs of a request, noise [K, P], and the guide of a prefix."""
        policy, schedule = self._policy, self._policy.network.schedule
        seed = request.seed if request.seed is not None else secrets.randbits(63) if self._samples else 0
        guide = None
        if len(request.prefix):
            scaled = policy.folder.normalize_actions(request.prefix, np.asarray(request.observation["state"]))
            guide = make_guide(scaled, request.delay, (schedule.chunk, schedule.padded_size))
        noise = policy.draw_noise(np.random.default_rng(seed))
        return policy.sense(request.observation, request.prompt), noise, guide

    def _compute(self, requests: Sequence[ActRequest]) -> list[FloatArray]:
        sensed, noise, guides = zip(*[self._prepare(request) for request in requests], strict=True)
        chunks = self._policy.network.sample(
            _join_sensed(sensed),
            torch.from_numpy(np.stack(noise)),
            guides if any(guide is not None for guide in guides) else (),
        )
        restore = self._policy.folder.restore_actions
        return [
            restore(chunk, np.asarray(request.observation["state"], np.float32))
            for chunk, request in zip(chunks.numpy(), requests, strict=True)
        ]


def _join_sensed(each: Sequence[Sensed]) -> Sensed:
    """Joins inputs of one row each. Shorter prompts are padded."""
    longest = max(one.token_ids.shape[1] for one in each)
    missing = [longest - one.token_ids.shape[1] for one in each]
    return Sensed(
        pictures=[torch.cat(rows) for rows in zip(*(one.pictures for one in each), strict=True)],
        token_ids=torch.cat([F.pad(one.token_ids, (0, more)) for one, more in zip(each, missing, strict=True)]),
        is_real=torch.cat([F.pad(one.is_real, (0, more)) for one, more in zip(each, missing, strict=True)]),
        state=torch.cat([one.state for one in each]),
    )


def _load_tokenizer(path: Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a policy folder. Raises UserError if the folder has none."""
    from transformers import AutoTokenizer

    vlm = json.loads((path / CONFIG).read_text(encoding="utf-8")).get("vlm_model_name")
    places = [path / "tokenizer", path, *([path / vlm] if isinstance(vlm, str) else [])]
    for place in places:
        if any((place / file).is_file() for file in TOKENIZER_FILES):
            try:
                found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place)
            except (OSError, ValueError) as error:
                raise UserError(f"the tokenizer in {place} cannot be read: {first_line(error)}") from None
            return found
    raise UserError(
        f"policy folder {str(path)!r} has no tokenizer. Save the tokenizer of its language model as "
        f"{path / 'tokenizer'}."
    )
