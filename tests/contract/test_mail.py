"""Ranks send arrays and tensors directly to each other, on every cluster that supports it."""

import contextlib
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interlace.core.errors import InterlaceError, RemoteError
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.process.mail import FolderDirectory, Mailbox
from interlace.runtime.worker import Worker, WorkerSpec, operation
from interlace.schedule.schedule import Schedule
from tests.contract.clusters import CLUSTERS, WITH_TORCH

NUM_NUMBERS = 1 << 20
"""Four megabytes: enough to go through shared memory."""


class Pen(Worker):
    """Writes to others and reads what they write."""

    @operation(on_device=False, collect="all")
    def process(self) -> int:
        return os.getpid()

    @operation(on_device=False, collect="all")
    def write(self, to: str, number: int) -> None:
        tensor = torch.full((NUM_NUMBERS,), float(number + self.context.rank), dtype=torch.bfloat16)
        array = np.full(NUM_NUMBERS, number, np.int32)
        self.context.send(to.format(other=1 - self.context.rank), {"tensor": tensor, "array": array, "text": "hello"})

    @operation(on_device=False, collect="all")
    def read(self, source: str, patience_s: float = 30.0) -> tuple[float, int, str, str]:
        found = self.context.recv(source.format(other=1 - self.context.rank), patience_s=patience_s)
        tensor, array = found["tensor"], found["array"]
        array += 1  # it is the reader's own
        assert (tensor == tensor[0]).all() and (array == array[0]).all() and len(tensor) == len(array) == NUM_NUMBERS
        return float(tensor[0]), int(array[0]), found["text"], str(tensor.dtype)


async def launch(cluster: Cluster, name: str, ranks: int = 1) -> WorkerGroup[Any]:
    devices = cluster.devices[:ranks]
    spec = WorkerSpec(name=name, factory=Pen, worker_class=Pen, devices=devices, num_ranks=ranks, preload=WITH_TORCH)
    return await cluster.launch(spec)


@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_ranks_of_one_and_of_several_groups_write_to_each_other(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "ray":
        request.getfixturevalue("ray_session")

    async def body(cluster: Cluster) -> None:
        pair, alone = await launch(cluster, "pair", 2), await launch(cluster, "alone")
        assert len({*await pair.process(), *await alone.process()}) == 3
        await pair.write("pair.{other}", 3)
        crossed = await pair.read("pair.{other}")
        assert crossed == [(4.0, 4, "hello", "torch.bfloat16"), (3.0, 4, "hello", "torch.bfloat16")]
        for number in (5, 6):  # in order
            await alone.write("pair.0", number)
            await alone.write("pair.1", number)
        for number in (5, 6):
            assert [found[:2] for found in await pair.read("alone.0")] == [(float(number), number + 1)] * 2
        reading = alone.read("pair.1")
        await pair.write("alone.0", 7)
        assert (await reading)[0][:2] == (8.0, 8)
        with pytest.raises(RemoteError, match=r"no message came from pair\.9 within 0\.1 s"):
            await alone.read("pair.9", 0.1)

    CLUSTERS[kind](body, Schedule(), 100)


class Unreadable:
    """An object whose class does not exist at the receiver."""

    def __reduce__(self) -> tuple[object, ...]:
        return import_module, ("no_such_module",)


def open_boxes(folder: Path) -> tuple[Mailbox, Mailbox]:
    """Opens the mailboxes of two ranks that count as processes, so that messages are pickled."""
    found = Mailbox("a.0", FolderDirectory(folder)), Mailbox("b.0", FolderDirectory(folder))
    for file in (folder / "a.0", folder / "b.0"):
        host, port, secret, _, has_memory = json.loads(file.read_text())
        file.write_text(json.dumps([host, port, secret, -1, has_memory]))
    return found


def test_a_message_that_cannot_be_read_fails_the_calls_that_receive_from_its_sender(tmp_path: Path) -> None:
    box, other = open_boxes(tmp_path)
    third = Mailbox("c.0", FolderDirectory(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(box.recv, "b.0", "late", 60.0)
        other.send("a.0", 1, "", 5.0)
        other.send("a.0", Unreadable(), "", 5.0)
        cause = r"a\.0: a message from b\.0 cannot be read here \(ModuleNotFoundError: .*no_such_module"
        with pytest.raises(InterlaceError, match=cause):
            waiting.result(30)
    assert box.recv("b.0", "", 5.0) == 1  # it was sent before
    for tag in ("", "later"):
        with pytest.raises(InterlaceError, match=cause):
            box.recv("b.0", tag, 60.0)
    third.send("a.0", 2, "", 5.0)
    assert box.recv("c.0", "", 5.0) == 2
    for each in (box, other, third):
        each.close()


def test_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    box, other = open_boxes(tmp_path)
    box.close()
    with pytest.raises(InterlaceError, match=r"b\.0: a\.0 is gone, and a message to it was lost"):
        other.send("a.0", 1, "", 5.0)
    other.close()


def test_what_a_stranger_sends_is_not_read(tmp_path: Path) -> None:
    box, other = Mailbox("a.0", FolderDirectory(tmp_path)), Mailbox("b.0", FolderDirectory(tmp_path))
    host, port, *_ = json.loads((tmp_path / "a.0").read_text())
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(b"x" * 64 + b"anything")
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "it is hung up on"
    other.send("a.0", {"n": 1}, "", 5.0)
    assert box.recv("b.0", "", 5.0) == {"n": 1}
    box.close()
    other.close()
