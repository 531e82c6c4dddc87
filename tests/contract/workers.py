"""Workers of the contract suite, importable so that a cluster of processes can make them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.core.types import SampleKey
from interlace.runtime.worker import Worker, WorkerContext, operation


@dataclass(frozen=True)
class Item:
    """A row that shares nothing with others."""

    value: int
    num_tokens: int
    key: SampleKey = SampleKey(0, 0)
    uid: str = ""
    num_prompt_tokens: int = 0


class Recorder(Worker):
    """Says what was asked of it."""

    def __init__(self, context: WorkerContext, memory: int = 10) -> None:
        super().__init__(context)
        self._memory = memory
        self.log: list[str] = []
        self._inside = 0
        self._all_here = asyncio.Event()

    def onload(self) -> None:
        self.log.append("onload")

    def offload(self, what: str = "offload") -> None:
        self.log.append(what)

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._memory

    @operation(bin="train")
    def work(self, name: str) -> int:
        self.log.append(name)
        return self.context.rank

    @operation(bin="train", collect="all")
    def everywhere(self) -> int:
        return self.context.rank

    @operation(bin="train", split="samples", collect="concat")
    def squares(self, items: Sequence[Item]) -> list[tuple[int, int]]:
        return [(item.value**2, self.context.rank) for item in items]

    @operation(bin="train")
    async def later(self, value: int) -> int:
        await asyncio.sleep(0.01)
        return value

    @operation(bin="train")
    async def in_turn(self) -> int:
        """How many were inside at most, as this call saw it."""
        self._inside += 1
        await asyncio.sleep(0.01)
        seen = self._inside
        await asyncio.sleep(0.01)
        self._inside -= 1
        return seen

    @operation(on_device=False)
    async def together(self, count: int) -> None:
        """Ends at the same moment as `count` - 1 others."""
        self._inside += 1
        if self._inside == count:
            self._all_here.set()
        await self._all_here.wait()

    @operation(on_device=False)
    async def overlapping(self) -> int:
        return await self.in_turn()

    @operation(bin="train")
    def fails(self) -> None:
        raise KeyError("no such thing")

    @operation(on_device=False)
    def history(self) -> list[str]:
        return self.log

    @operation(on_device=False, concurrent=True)
    def nudge(self) -> None:
        self.log.append("nudge")


class Trainer(Worker):
    """Has parts, of which its operations need some. The log says what came and went."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.log: list[str] = []

    def onload(self, parts: Sequence[str] | None = None) -> None:
        self.log.append(f"+{' '.join(parts or ['all'])}")

    def offload(self, parts: Sequence[str] | None = None) -> None:
        self.log.append(f"-{' '.join(parts or ['all'])}")

    @operation(on_device=False)
    def memory_parts(self) -> Mapping[str, int]:
        return {"gradients": 20, "moments": 40, "weights": 20}

    @operation(bin="train", parts=("gradients", "weights"))
    def accumulate(self) -> None:
        self.log.append("accumulate")

    @operation(bin="train", makes_activations=False)
    def update(self) -> None:
        self.log.append("update")

    @operation(bin="weight_sync", parts=("weights",), makes_activations=False)
    def export(self) -> None:
        self.log.append("export")

    @operation(on_device=False)
    def history(self) -> list[str]:
        return self.log


class Closing(Worker):
    """Leaves a note when it ends."""

    def __init__(self, context: WorkerContext, note: Path) -> None:
        super().__init__(context)
        self._note = note

    @operation(bin="train")
    def fails(self) -> None:
        raise KeyError("no such thing")

    def close(self) -> None:
        self._note.write_text("closed")


class Unending(Worker):
    def close(self) -> None:
        raise RuntimeError("cannot end")


class Broken(Worker):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        raise RuntimeError("cannot start")
