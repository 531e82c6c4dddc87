"""Workers that keep and read contents, in a module that ranks import without models."""

import os
import signal
from dataclasses import dataclass
from typing import Any

from interlace.core.payload import Stored
from interlace.core.types import Sample
from interlace.runtime.worker import Worker, operation

PICTURE = (64, 64, 4)


class Reader(Worker):
    @operation(on_device=False, split="samples", collect="concat")
    def read(self, samples: list[Sample]) -> list[tuple[int, bytes, bytes, str]]:
        return [(os.getpid(), each.token_ids.tobytes(), each.logprobs.tobytes(), each.text) for each in samples]


@dataclass(frozen=True, kw_only=True)
class Picture:
    key: int
    content: Stored[Any]


class Camera(Worker):
    @operation(on_device=False)
    def take(self, number: int) -> Picture:
        import torch

        return Picture(key=number, content=self.context.keep(torch.full(PICTURE, number, dtype=torch.bfloat16)))

    @operation(on_device=False)
    def take_and_die(self) -> Picture:
        """Writes a picture that no reply will name."""
        import torch

        self._last = self.context.keep(torch.full(PICTURE, 9, dtype=torch.bfloat16))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    @operation(on_device=False)
    def process(self) -> int:
        return os.getpid()


class Learner(Worker):
    @operation(on_device=False, split="samples", collect="concat")
    def learn(self, pictures: list[Picture]) -> list[float]:
        return [float(each.content.read().mean()) for each in pictures]

    @operation(on_device=False)
    def pass_on(self, pictures: list[Picture]) -> list[Picture]:
        return pictures
