"""Shared arrays arrive intact, are copied only if needed, and leave no files."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from interlace.core.processes import name_own_folder, remove_left_folders
from interlace.engines.rollout.services import version_folders
from interlace.runtime.process.frames import SHARED_BYTES, Assembler, Call, Reply, encode
from interlace.runtime.process.shared import SharedArrays, SharedFolder, write_all


def received(parts: list[bytes | memoryview], shared: SharedArrays) -> Call | Reply:
    stream, assembler, whole = b"".join(bytes(part) for part in parts), Assembler(shared), list[Call | Reply]()
    while stream:
        size = min(len(assembler.space), len(stream))
        assembler.space[:size] = stream[:size]
        whole, stream = assembler.received(size), stream[size:]
    (message,) = whole
    return message


def arrays() -> list[np.ndarray]:
    return [np.arange(SHARED_BYTES + odd, dtype=np.uint8) for odd in (0, 3)]


def test_an_array_is_written_once_and_passed_on_by_name(tmp_path: Path) -> None:
    controller, rank = SharedArrays(tmp_path, passes_on=True), SharedArrays(tmp_path, passes_on=False)
    reply = received(encode(Reply(number=1, value=arrays()), rank), controller)
    (segment,) = tmp_path.iterdir()
    parts = encode(Call(number=1, method="take", args=(reply.value[1],)), controller)
    assert sum(len(part) for part in parts) < 1000
    assert list(tmp_path.iterdir()) == [segment]
    call = received(parts, rank)
    np.testing.assert_array_equal(call.args[0], arrays()[1])


def test_a_segment_goes_when_nothing_of_it_is_used(tmp_path: Path) -> None:
    controller, rank = SharedArrays(tmp_path, passes_on=True), SharedArrays(tmp_path, passes_on=False)
    reply = received(encode(Reply(number=1, value=arrays()), rank), controller)
    part = reply.value[0][:10]
    del reply
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1
    del part
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_segment_is_forgotten_while_its_addresses_are_still_its_own(tmp_path: Path) -> None:
    """Whatever is mapped next may get the same addresses, on another thread, as soon as they are given back."""
    controller, rank = SharedArrays(tmp_path, passes_on=True), SharedArrays(tmp_path, passes_on=False)
    forget, was_mapped = controller._forget, list[bool]()

    def forgets(start: int, name: str) -> None:
        was_mapped.append(name in Path("/proc/self/maps").read_text())
        forget(start, name)

    controller._forget = forgets  # type: ignore[method-assign]
    reply = received(encode(Reply(number=1, value=arrays()), rank), controller)
    del reply
    gc.collect()
    assert was_mapped == [True] and not list(tmp_path.iterdir())


def test_what_is_passed_on_cannot_be_changed_by_one_of_its_readers(tmp_path: Path) -> None:
    controller, rank = SharedArrays(tmp_path, passes_on=True), SharedArrays(tmp_path, passes_on=False)
    reply = received(encode(Reply(number=1, value=arrays()), rank), controller)
    call = received(encode(Call(number=1, method="take", args=tuple(reply.value)), controller), rank)
    assert not reply.value[0].flags.writeable and not call.args[0].flags.writeable


def test_what_the_controller_made_is_gone_once_it_arrived(tmp_path: Path) -> None:
    controller, rank = SharedArrays(tmp_path, passes_on=True), SharedArrays(tmp_path, passes_on=False)
    call = received(encode(Call(number=1, method="take", args=tuple(arrays())), controller), rank)
    assert not list(tmp_path.iterdir())
    np.testing.assert_array_equal(call.args[1], arrays()[1])
    call.args[1][:] = 0


def test_without_room_in_memory_the_message_carries_its_arrays(tmp_path: Path) -> None:
    nowhere = SharedArrays(tmp_path / "gone", passes_on=False)
    parts = encode(Reply(number=1, value=arrays()), nowhere)
    assert sum(len(part) for part in parts) > 2 * SHARED_BYTES


def test_a_writer_that_writes_little_is_called_again() -> None:
    reader, writer = os.pipe()
    parts = [b"ab", b"", b"cdef", b"g"]
    write_all(lambda left: os.write(writer, bytes(left[0][:3])), parts)
    assert os.read(reader, 100) == b"abcdefg"
    os.close(reader)
    os.close(writer)


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from interlace.runtime.process.shared import SharedFolder\n"
        "folder = SharedFolder(Path(sys.argv[1])); print(folder.path, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        theirs = Path(other.stdout.readline().strip())
        SharedFolder(tmp_path).remove()
        assert theirs.is_dir()
        other.kill()
    ours = SharedFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [ours.path]
    ours.remove()


def test_what_another_user_put_there_holds_up_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "interlace-x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "interlace-y").symlink_to(tmp_path / "elsewhere")
    program = "import sys; from pathlib import Path; from interlace.runtime.process.shared import SharedFolder\n"
    code = program + "SharedFolder(Path(sys.argv[1])).remove()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "interlace-x", "interlace-y"]


def test_removal_leaves_nothing_while_a_process_still_writes(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    ends = threading.Event()

    def write() -> None:
        number = 0
        while not ends.is_set():
            number += 1
            with contextlib.suppress(OSError):
                (folder.path / str(number)).write_bytes(bytes(1000))

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.2)
    folder.remove()
    ends.set()
    writer.join()
    assert not [*tmp_path.iterdir()]


def test_a_folder_of_another_container_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers with a common /dev/shm (docker run --ipc=host) number their processes on their own."""
    monkeypatch.setattr(version_folders, "SHARED", tmp_path)
    there = SharedFolder(tmp_path, version_folders.PREFIX)
    there.path = there.path.rename(tmp_path / f"{version_folders.PREFIX}999999999-x")
    version_folders.remove_stale_folders()
    assert there.path.is_dir(), "its process has no number here, and its lock shows that it lives"
    there.remove()
    (tmp_path / f"{version_folders.PREFIX}999999999-killed").mkdir()
    version_folders.remove_stale_folders()
    assert not [*tmp_path.iterdir()]


def test_folders_named_after_a_process_are_removed_only_in_its_container(tmp_path: Path) -> None:
    (own := tmp_path / name_own_folder("mail-")).mkdir()
    process, namespace, _ = own.name.removeprefix("mail-").split("-")
    (other := tmp_path / f"mail-999999999-{int(namespace) + 1}-x").mkdir()
    (ended := tmp_path / f"mail-999999999-{namespace}-x").mkdir()
    remove_left_folders(tmp_path, "mail-")
    assert process == str(os.getpid()) and own.is_dir() and other.is_dir() and not ended.exists()
