"""Contents of samples in shared memory: what a reference has without the file, and who removes the file."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from interlace.core import payload
from interlace.core.errors import PayloadLostError
from interlace.core.payload import (
    PayloadStore,
    StoredColumn,
    StoredSegments,
    StoredText,
    is_lost,
    remove_orphans,
)
from interlace.core.recovery import cause_of
from interlace.core.runs import Runs
from interlace.core.types import FinishReason, Prompt, Request, Response, Sample, SampleKey, SamplingParams, Segment
from interlace.robots.replay.trajectory_file import sample_from_bytes, sample_to_bytes
from interlace.runtime.channel import with_columns
from interlace.runtime.process.frames import Assembler, Call, encode
from interlace.runtime.process.shared import SharedArrays

SIZE = 3000
TEXT = "a response, ünicode " * 100
PROMPT = Prompt(uid="p", token_ids=np.arange(3, dtype=np.int32), text="", answer="")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(payload, "_FREE_SHARE", 0)  # the folder of tests is on a disk, which may be fuller
    yield tmp_path
    assert not list(tmp_path.glob("payload-*")), "every file was removed with its last reference"


def segments(mask: bool) -> tuple[Segment, ...]:
    ids = np.arange(SIZE, dtype=np.int32)
    drawn = Segment(token_ids=ids, logprobs=-ids.astype(np.float32) / 7, versions=Runs([(3, SIZE - 1), (4, 1)]))
    if not mask:
        return (drawn,)
    inserted = Segment(
        parent=0, token_ids=ids[:5], sampled=np.zeros(5, np.bool_), versions=Runs.repeated(4, 5),
        inputs={"image": np.full((2, 8, 8), 7, np.uint8)}, kind="tool",
    )  # fmt: skip
    return (drawn, inserted)


def store(folder: Path, content: tuple[Segment, ...]) -> StoredSegments:
    found = PayloadStore(folder).put_sample(content, TEXT)
    assert found is not None
    return found


def received(value: object, shared: SharedArrays | None) -> object:
    """Returns a value after a message to a receiver with this shared memory."""
    message = b"".join(encode(Call(number=1, method="", args=(value,)), shared))
    assembler, found = Assembler(shared), []
    while message:
        size = min(len(message), len(assembler.space))
        assembler.space[:size] = message[:size]
        found += assembler.received(size)
        message = message[size:]
    (call,) = found
    assert isinstance(call, Call)
    return call.args[0]


@pytest.mark.parametrize("mask", [False, True], ids=["one response", "with inserted tokens"])
def test_a_sample_reads_the_same_with_stored_segments(folder: Path, mask: bool) -> None:
    whole = Sample(key=SampleKey(0, 1), prompt=PROMPT, segments=segments(mask), text=TEXT)
    found = received(store(folder, segments(mask)), SharedArrays(folder, passes_on=True))
    assert isinstance(found, StoredSegments)
    sample = with_columns(whole, {"segments": found, "text": StoredText(found)})
    assert sample.text == TEXT and sample.sampled_ids.tolist() == whole.sampled_ids.tolist()
    assert sample_to_bytes(sample) == sample_to_bytes(whole), "a replay buffer writes the content, not the reference"
    assert sample_from_bytes(sample_to_bytes(sample)).token_ids.tolist() == whole.token_ids.tolist()


def test_metadata_needs_no_file(folder: Path) -> None:
    found = pickle.loads(pickle.dumps(store(folder, segments(True))))
    sample = Sample(key=SampleKey(0, 1), prompt=PROMPT, segments=found)
    for file in folder.iterdir():
        file.unlink()
    assert (len(found), sample.num_tokens, sample.num_sampled) == (2, SIZE + 5, SIZE)
    assert sample.versions.pieces == ((3, SIZE - 1), (4, 1), (4, 5))
    with pytest.raises(PayloadLostError, match="content of a sample is lost") as lost:
        sample.token_ids  # noqa: B018 - reads the file
    assert cause_of(lost.value).is_infrastructure


def test_the_receiver_owns_the_file_and_readers_do_not(folder: Path) -> None:
    owned = pickle.loads(pickle.dumps(store(folder, segments(False))))  # as a reply of the process that wrote it
    reader = pickle.loads(pickle.dumps(owned))
    assert reader[0].token_ids[-1] == SIZE - 1
    tokens = reader[0].token_ids
    del reader
    assert len(list(folder.glob("payload-*"))) == 1, "a reader removes nothing"
    tokens[0] = 9  # a reader's writes are private
    assert owned[0].token_ids[0] == 0
    del owned
    assert not list(folder.glob("payload-*")) and tokens[1] == 1, "a mapped file can be read after its removal"


def test_the_writer_removes_a_file_that_it_never_sent(folder: Path) -> None:
    kept = store(folder, segments(False))
    assert len(list(folder.glob("payload-*"))) == 1
    del kept
    assert not list(folder.glob("payload-*"))


def test_files_of_a_dead_process_without_a_reference_are_removed(folder: Path) -> None:
    sent, lost = store(folder, segments(False)), store(folder, segments(False))
    owned = pickle.loads(pickle.dumps(sent))
    pickle.dumps(lost)  # into a message that never arrives
    (folder / f"payload-{os.getpid()}1-0").touch()  # of another process
    assert remove_orphans(folder, os.getpid()) == 1
    assert owned[0].token_ids[-1] == SIZE - 1 and not is_lost(owned) and is_lost(lost)
    (folder / f"payload-{os.getpid()}1-0").unlink()


def test_contents_that_the_controller_wrote_stay_if_a_dead_rank_has_its_number(folder: Path) -> None:
    """A rank on another machine or in a container may have the controller's process number."""
    written = PayloadStore(folder, is_owner=True).put_sample(segments(False), TEXT)
    assert written is not None
    assert remove_orphans(folder, os.getpid()) == 0 and not is_lost(written)


def test_a_receiver_on_another_machine_gets_the_content(folder: Path) -> None:
    owned = pickle.loads(pickle.dumps(store(folder, segments(True))))
    found = received(owned, None)
    assert isinstance(found, tuple) and found[0].token_ids.tolist() == owned[0].token_ids.tolist()
    sample = Sample(key=SampleKey(0, 1), prompt=PROMPT, segments=owned, text=StoredText(owned))
    assert (moved := received(sample, None)) and isinstance(moved, Sample)
    assert moved.text == TEXT and isinstance(moved.segments, tuple)


def test_small_contents_and_a_full_memory_are_sent_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Segment(token_ids=np.arange(9, dtype=np.int32))
    assert PayloadStore(folder).put_sample((short,), "") is None
    monkeypatch.setattr(payload, "_FREE_SHARE", 1.1)
    assert PayloadStore(folder).put_sample(segments(False), TEXT) is None
    monkeypatch.setattr(payload, "_FREE_SHARE", 0)
    assert PayloadStore(folder / "missing").put_sample(segments(False), TEXT) is None


def test_a_file_of_an_earlier_process_of_the_same_number_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(folder, segments(False))
    number = int(kept.content._path.rpartition("-")[2])
    monkeypatch.setattr(PayloadStore, "_numbers", iter([number]))
    assert PayloadStore(folder).put_sample(segments(False), "") is None, "it is sent whole"
    Path(kept.content._path).unlink()


def test_a_completion_with_stored_columns_continues_from_values(folder: Path) -> None:
    owned = pickle.loads(pickle.dumps(store(folder, segments(False))))
    ids, logprobs = StoredColumn(owned, "token_ids"), StoredColumn(owned, "logprobs")
    request = Request(uid="p", owner=SampleKey(0, 0), prompt_ids=(1,), params=SamplingParams())
    done = Response(
        request=request, token_ids=ids, logprobs=logprobs, versions=owned.versions, finish_reason=FinishReason.LENGTH
    )
    assert len(ids) == SIZE and ids[2] == 2 and ids[-2:] == [SIZE - 2, SIZE - 1]
    assert done.segments is owned
    assert done.resumed.generated_ids == tuple(range(SIZE)) and type(done.resumed.generated_logprobs[1]) is float


WRITER = """
import os, pickle, signal, sys
from pathlib import Path
from interlace.core import payload
from interlace.core.payload import PayloadStore
from tests.unit.core.test_payload import TEXT, segments
payload._FREE_SHARE = 0
sys.stdout.buffer.write(pickle.dumps(PayloadStore(Path(sys.argv[1])).put_sample(segments(False), TEXT)))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_content_outlives_the_process_that_wrote_it(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(folder)], capture_output=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    owned = pickle.loads(done.stdout)
    assert StoredText(owned).read() == TEXT and owned[0].token_ids.tolist() == list(range(SIZE))
