"""Writers and readers in one process work over each transport and codec."""

import errno
import os
import socket
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interlace.core.errors import DiskFullError, InterlaceError
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import Box, Shard
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Route, WeightRef
from interlace.weights.transports.gloo import PeerReceiver
from interlace.weights.writer import WeightWriter

WIRED = ("object_store", "gloo", "folder")
TRANSPORTS = ("alias", "shared_memory", *WIRED)


def weights(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(37, 16, generator=made).to(dtype),
        "bias": torch.randn(5, generator=made).to(dtype),
        "experts": torch.randn(3, 4, 6, generator=made).to(dtype),
        "scale": torch.tensor(1.0 + version, dtype=dtype),
        "count": torch.tensor([version, 7]),
    }


@contextmanager
def ends(
    tmp_path: Path, transport: str, codec: str = "raw", **more: object
) -> Iterator[tuple[WeightWriter, WeightReader]]:
    config = WeightsConfig.parse(
        {"transport": transport, "codec": codec, "folder": str(tmp_path), "patience_s": 30.0, **more}
    )
    writer, reader = WeightWriter(Route(transport=transport, config=config)), WeightReader()
    try:
        yield writer, reader
    finally:
        reader.close()
        writer.close()


def publish(writer: WeightWriter, version: int, tensors: Mapping[str, Tensor], **more: object) -> WeightRef:
    return WeightRef(version=version, parts=(writer.write(version, tensors, **more),))  # type: ignore[arg-type]


def taken(reader: WeightReader, ref: WeightRef) -> dict[str, Tensor]:
    with reader.open(ref) as read:
        return {name: tensor.clone() for name, tensor in read.items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_brings_the_same_bits_version_after_version(tmp_path: Path, transport: str) -> None:
    with ends(tmp_path, transport) as (writer, reader):
        for version in range(5):
            given = weights(version)
            ref = publish(writer, version, given)
            for tensor in given.values():
                tensor.zero_()  # the trainer goes on
            assert_equal(taken(reader, ref), weights(version))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_floats_travel_in_the_type_that_is_served(tmp_path: Path, transport: str) -> None:
    with ends(tmp_path, transport) as (writer, reader):
        ref = publish(writer, 1, weights(1, torch.float32), served=torch.bfloat16)
        assert_equal(taken(reader, ref), weights(1))
        assert ref.num_bytes == sum(tensor.nbytes for tensor in weights(1).values())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_cast_halves_float32_and_int8_rounds_by_row(tmp_path: Path, transport: str) -> None:
    given = weights(2, torch.float32)
    with ends(tmp_path, transport, "cast") as (writer, reader):
        ref = publish(writer, 2, given)
        rounded = {name: t.bfloat16().float() if t.is_floating_point() else t for name, t in given.items()}
        assert_equal(taken(reader, ref), rounded)
    with ends(tmp_path, transport, "int8") as (writer, reader):
        found = taken(reader, publish(writer, 3, given))
    assert torch.equal(found["bias"], given["bias"]) and torch.equal(found["count"], given["count"])
    for name in ("embed", "experts"):
        step = given[name].abs().amax(-1, keepdim=True) / 127
        assert ((found[name] - given[name]).abs() <= step * 0.501).all()


def test_cast_keeps_the_tensors_that_a_model_in_16_bits_keeps_in_float32(tmp_path: Path) -> None:
    """An engine that rounds the bias of a router chooses other experts than the trainer."""
    given = weights(2, torch.float32)
    with ends(tmp_path, "alias", "cast") as (writer, reader):
        found = taken(reader, publish(writer, 2, given, served=torch.bfloat16, exact=("bias",)))
    assert torch.equal(found["bias"], given["bias"]) and found["embed"].dtype == torch.bfloat16


def stepped(tensors: Mapping[str, Tensor], version: int, share: float) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(100 + version)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=made) < share, tensor + 1, tensor)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("transport", WIRED)
def test_deltas_bring_the_same_bits_and_a_late_reader_finds_all_it_needs(tmp_path: Path, transport: str) -> None:
    with ends(tmp_path, transport, "delta", full_every=4) as (writer, reader):
        current, codecs = weights(0), []
        for version in range(9):
            ref = publish(writer, version, current)
            codecs.append(ref.parts[0].codec)
            assert_equal(taken(reader, ref), current)
            late = WeightReader()
            assert_equal(taken(late, ref), current)
            late.close()
            current = stepped(current, version, 0.02)
        assert codecs == ["raw", "delta", "delta", "delta", "raw", "delta", "delta", "delta", "raw"]


def test_a_dense_change_is_sent_whole(tmp_path: Path) -> None:
    with ends(tmp_path, "object_store", "delta") as (writer, reader):
        publish(writer, 0, weights(0))
        dense = publish(writer, 1, weights(1))
        assert dense.parts[0].codec == "raw"
        assert_equal(taken(reader, dense), weights(1))


def test_changes_far_apart_are_written_with_values_in_between(tmp_path: Path) -> None:
    with ends(tmp_path, "object_store", "delta") as (writer, reader):
        before = {"w": torch.zeros(500_000)}
        taken(reader, publish(writer, 0, before))
        after = before["w"].clone()
        after[[0, 1, 65536, 131072, 499_999]] = torch.arange(1.0, 6)
        ref = publish(writer, 1, {"w": after})
        assert ref.parts[0].codec == "delta" and ref.num_bytes < 100
        assert_equal(taken(reader, ref), {"w": after})


def test_a_delta_that_was_changed_on_the_way_or_lacks_its_base_is_refused(tmp_path: Path) -> None:
    with ends(tmp_path, "object_store", "delta") as (writer, reader):
        first = weights(0)
        taken(reader, publish(writer, 0, first))
        second = stepped(first, 1, 0.02)
        ref = publish(writer, 1, second)
        part = ref.parts[0]
        part.source.tensors["embed#values"][0] ^= 1  # type: ignore[attr-defined]
        with pytest.raises(InterlaceError, match="arrived broken"):
            taken(reader, ref)
        part.source.tensors["embed#values"][0] ^= 1  # type: ignore[attr-defined]
        assert_equal(taken(reader, ref), second)
        with pytest.raises(InterlaceError, match="is a delta on version 0"):
            taken(WeightReader(), WeightRef(version=1, parts=(replace(part, behind=()),)))
        left_out = replace(part, behind=tuple(replace(each, source=None) for each in part.behind))
        with pytest.raises(InterlaceError, match="did not come along"):  # the engine was restarted
            taken(WeightReader(), WeightRef(version=1, parts=(left_out,)))


def test_a_delta_is_not_applied_to_a_version_of_the_same_number_from_another_trainer(tmp_path: Path) -> None:
    """A server outlives a run, and the next run begins its versions again."""
    reader = WeightReader()
    for seed, last in ((0, 1), (10, 2)):
        with ends(tmp_path, "object_store", "delta") as (writer, _):
            current = weights(seed)
            for version in range(last + 1):
                ref = publish(writer, version, current)
                if version == last:
                    assert_equal(taken(reader, ref), current)
                current = stepped(current, version, 0.02)
    reader.close()


@pytest.mark.parametrize("is_served", [False, True])
def test_an_equal_delta_of_another_trainer_does_not_make_its_version_known(tmp_path: Path, is_served: bool) -> None:
    """A step at learning rate 0 gives an empty delta, which is equal in every run."""
    reader = WeightReader(is_served=is_served)
    with ends(tmp_path, "object_store", "delta") as (writer, _):
        for version in range(2):
            taken(reader, publish(writer, version, weights(0)))
    with ends(tmp_path, "object_store", "delta") as (writer, _):
        for version in range(2):
            assert publish(writer, version, weights(10)).parts[0].codec == ("delta" if version else "raw")
        expected = stepped(weights(10), 2, 0.02)
        [part] = publish(writer, 2, expected).parts
        with pytest.raises(InterlaceError, match="is a delta on version 1"):
            taken(reader, WeightRef(version=2, parts=(replace(part, behind=part.behind[1:]),)))
        assert_equal(taken(reader, WeightRef(version=2, parts=(part,))), expected)
    reader.close()


@pytest.mark.parametrize("codec", ["raw", "delta"])
def test_received_parts_are_freed_when_no_tensor_uses_them(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed in memory until the next version was loaded, beside the blocks that were made of them."""
    received: list[weakref.ref[Tensor]] = []
    receive = PeerReceiver._receive_pieces

    def receive_pieces(self: PeerReceiver, *given: Any) -> list[Tensor]:
        made = receive(self, *given)
        received.extend(map(weakref.ref, made))
        return made

    monkeypatch.setattr(PeerReceiver, "_receive_pieces", receive_pieces)
    with ends(tmp_path, "gloo", codec) as (writer, reader):
        current = weights(0)
        for version in range(3):
            with reader.open(publish(writer, version, current)) as read:
                kept = {name: tensor.clone() for name, tensor in read.items()}
                assert codec == "raw" or not any(each() is not None for each in received)
            del read
            assert received and not any(each() is not None for each in received)
            assert_equal(kept, current)
            current = stepped(current, version, 0.02)


def test_a_trainer_at_the_port_of_an_earlier_one_is_called_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server outlives its run. The connection to the earlier trainer was used for the later one."""
    with ends(tmp_path, "gloo") as (writer, reader):
        ref = publish(writer, 1, weights(1))
        assert_equal(taken(reader, ref), weights(1))
        writer.close()
        source, listen = ref.parts[0].source, socket.create_server
        monkeypatch.setattr(socket, "create_server", lambda _: listen((source.host, source.port)))  # type: ignore[attr-defined]
        with ends(tmp_path, "gloo") as (later, _):
            assert_equal(taken(reader, publish(later, 1, weights(2))), weights(2))
            assert len(reader._receivers["gloo"]._calls) == 2  # type: ignore[attr-defined]
            [ended, _] = reader._receivers["gloo"]._calls.values()  # type: ignore[attr-defined]
            ended.connection.shutdown(socket.SHUT_RDWR)
            reader._receivers["gloo"]._close_ended()  # type: ignore[attr-defined]
            assert len(reader._receivers["gloo"]._calls) == 1  # type: ignore[attr-defined]


def test_a_delta_changes_no_block_that_an_engine_generates_with(tmp_path: Path) -> None:
    reader, current = WeightReader(is_served=True), weights(0)
    served, expected = dict[str, Tensor](), dict[str, Tensor]()
    with ends(tmp_path, "object_store", "delta") as (writer, _):
        for version in range(6):
            ref = publish(writer, version, current)
            with suppress(ValueError), reader.open(ref) as read:
                assert_equal(served, expected)
                if version == 2:
                    raise ValueError("the engine refuses this version")
                served, expected = {**read}, current
            assert_equal(served, expected)
            current = stepped(current, version, 0.02)
    reader.close()


def split(tensors: Mapping[str, Tensor], parts: int) -> list[list[Shard]]:
    """Rows dealt over ranks, as torch.chunk does."""
    ranks: list[list[Shard]] = [[] for _ in range(parts)]
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.ndim else 1
        step = -(-rows // parts)
        for rank in range(parts):
            first = min(rank * step, rows)
            length = min(step, rows - first)
            shape = tuple(tensor.shape)
            box = Box((first, *[0] * (tensor.ndim - 1)), (length, *shape[1:])) if tensor.ndim else Box((), ())
            ranks[rank].append(Shard(name, shape, str(tensor.dtype).removeprefix("torch."), box))
    return ranks


@pytest.mark.parametrize("codec", ["raw", "delta"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_trainer_ranks_to_two_engine_ranks(
    tmp_path: Path, transport: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if codec == "delta" and transport not in WIRED:
        pytest.skip("refused by the recipe")
    boxes: dict[int, Box] = {}
    monkeypatch.setattr("interlace.weights.shards.box_of", lambda tensor: boxes[id(tensor)])
    config = WeightsConfig.parse({"transport": transport, "codec": codec, "folder": str(tmp_path)})
    route = Route(transport=transport, config=config)
    writers = [WeightWriter(route, rank=rank, num_ranks=3) for rank in range(3)]
    current = weights(0)
    needs = split(current, 2)
    readers = [WeightReader(), *[WeightReader(shards) for shards in needs]]
    shapes_of = monkeypatch_shapes(monkeypatch)
    for version in range(3):
        parts = []
        for writer, shards in zip(writers, split(current, 3), strict=True):
            own = {shard.name: current[shard.name][shard.box.slices].clone() for shard in shards}
            for shard in shards:
                boxes[id(own[shard.name])] = shard.box
                shapes_of[id(own[shard.name])] = shard.shape
            parts.append(writer.write(version, own))
        ref = WeightRef(version=version, parts=tuple(parts))
        assert_equal(taken(readers[0], ref), current)
        for reader, shards in zip(readers[1:], needs, strict=True):
            expected = {shard.name: current[shard.name][shard.box.slices] for shard in shards}
            assert_equal(taken(reader, ref), expected)
        current = stepped(current, version, 0.02)
    for end in (*readers, *writers):
        end.close()


def monkeypatch_shapes(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, ...]]:
    """Blocks stand in for DTensors here; tests/e2e has real ones."""
    from interlace.weights import shards, writer

    known: dict[int, tuple[int, ...]] = {}

    def described(tensors: Mapping[str, Tensor], served: object, exact: object) -> tuple[Shard, ...]:
        return tuple(
            Shard(name, known[id(t)], str(t.dtype).removeprefix("torch."), shards.box_of(t))
            for name, t in tensors.items()
        )

    monkeypatch.setattr(writer, "shards_of", described)
    return known


def test_the_checksum_says_whether_an_update_changed_anything(tmp_path: Path) -> None:
    for transport in TRANSPORTS:
        with ends(tmp_path / transport, transport) as (writer, _):
            sums = [publish(writer, version, weights(min(version, 1))).checksum for version in range(3)]
        assert sums[0] != sums[1] == sums[2], transport


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_serves_from_what_it_reads_only_where_that_never_changes(tmp_path: Path, transport: str) -> None:
    given = weights(1)
    with ends(tmp_path, transport) as (writer, reader), reader.open(publish(writer, 1, given, copy=False)) as read:
        kept = {name: tensor if read.frozen else tensor.clone() for name, tensor in read.items()}
        for tensor in given.values():
            tensor.zero_()  # the trainer's next update
        assert_equal(kept, weights(1))


@pytest.mark.parametrize(("owner", "call"), [(os, "posix_fallocate"), (Path, "mkdir")])
def test_a_full_disk_leaves_no_part_of_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, call: str
) -> None:
    with ends(tmp_path, "folder") as (writer, reader):
        ref = publish(writer, 1, weights(1))
        whole = sorted(path.name for path in tmp_path.rglob("*"))

        def fill_up(*given: object, **options: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(owner, call, fill_up)
        with pytest.raises(DiskFullError, match=r"Make room, or set weights\.folder"):
            writer.write(2, weights(2))
        assert sorted(path.name for path in tmp_path.rglob("*")) == whole
        assert taken(reader, ref).keys() == weights(1).keys()


@pytest.mark.parametrize("transport", ["folder", "shared_memory"])
def test_a_version_is_written_on_a_system_that_cannot_reserve_room(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with ends(tmp_path, transport) as (writer, reader):
        assert_equal(taken(reader, publish(writer, 1, weights(1))), weights(1))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL does not allow two ranks on one GPU")
def test_nccl_sends_from_the_gpu_of_the_trainer(tmp_path: Path) -> None:
    with torch.cuda.device(1), ends(tmp_path, "nccl") as (writer, reader):
        ref = publish(writer, 1, {name: tensor.to("cuda:1") for name, tensor in weights(1).items()})
        with torch.cuda.device(0):
            assert_equal(taken(reader, ref), weights(1))
