"""A server reads each version itself, by a manifest over HTTP: every transport and codec brings the trainer's bits."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web
from torch import Tensor

from interlace.core.errors import UserError
from interlace.core.tasks import LoopThread
from interlace.core.types import JSON
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.rollout.config import ServedConfig
from interlace.engines.rollout.protocol import EngineReport
from interlace.engines.rollout.request_checks import Limits
from interlace.engines.rollout.services.dialects.interlace import connect
from interlace.engines.rollout.services.engine import ServedModel, ServiceEngine
from interlace.engines.rollout.services.hosted import HostedEngine
from interlace.engines.rollout.services.link import ServerLink
from interlace.engines.rollout.services.protocol import TRANSPORTS, Address, ServiceCapacity, read_manifest
from interlace.engines.rollout.services.routes import EngineRoutes
from interlace.engines.rollout.services.version_folders import NAME, PREFIX, VersionFolders
from interlace.engines.train.export import list_named_weights
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.weights.config import WeightsConfig
from interlace.weights.plan import ITEM_BYTES
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Route, WeightRef
from interlace.weights.saved import SavedWeights
from interlace.weights.writer import WeightWriter

MODEL = ModelConfig(path="tiny:micro")
SETTINGS = ServedConfig(heartbeat_s=60.0, health_timeout_s=60.0, progress_s=60.0, start_s=60.0, probe_gap=0.05)
WIDE = Limits(context=4096, longest=4096, vocab_size=10**7, has_tokenizer=False, reads=None)
REPORT = EngineReport(attention="server", invariant=True, reason="")
SENT = ("object_store", "gloo", "folder")


class Server:
    """A server over HTTP in this process, with the run's engine that is connected to it."""

    def __init__(self) -> None:
        native = NativeEngine(load_model(MODEL).model, config=NativeConfig(max_tokens=256, max_running=2))
        self.model, self.hosted = native.model, HostedEngine(native, ServiceCapacity())
        self._loop = LoopThread("server")
        self._url = self._loop.run(self._start())
        self._engines: list[ServiceEngine] = []
        self.engine = self.connect()
        self._reader = WeightReader()

    def connect(self) -> ServiceEngine:
        """Returns one more engine, of another run."""
        link = ServerLink(lambda: connect(Address(url=self._url, key="key"), seed=0), SETTINGS)
        link.open()
        self._engines.append(ServiceEngine(link, ServedModel(limits=WIDE, manifest_transports=TRANSPORTS), REPORT))
        return self._engines[-1]

    async def _start(self) -> str:
        app = web.Application()
        EngineRoutes(self.hosted, "key").add_to(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def pull(self, ref: WeightRef) -> None:
        self.engine.pull_weights(ref, "recompute", self._reader)

    def start_again(self) -> None:
        """Forgets the versions that the server has read, as a new process does."""
        self.hosted._reader.close()
        self.hosted._reader = WeightReader(is_served=True)
        assert not self.engine.recover()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        self._loop.run(self._runner.cleanup())
        self._loop.run(self.hosted.close())
        self._loop.close()


@pytest.fixture
def start() -> Iterator[Callable[[], Server]]:
    with ExitStack() as stack:

        def start_server() -> Server:
            server = Server()
            stack.callback(server.close)
            return server

        yield start_server


@contextmanager
def trainer(folder: Path, transport: str, codec: str) -> Iterator[WeightWriter]:
    config = WeightsConfig.parse(
        {"transport": transport, "codec": codec, "folder": str(folder / "versions"), "full_every": 4}
    )
    writer = WeightWriter(Route(transport=transport, config=config))
    yield writer
    writer.close()


def weights(seed: int) -> dict[str, Tensor]:
    model = load_model(MODEL.model_copy(update={"seed": seed})).model
    return {name: tensor.clone() for name, tensor in list_named_weights(model).items()}


def stepped(tensors: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """Changes one element in a hundred."""
    made = torch.Generator().manual_seed(version)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=made) < 0.01, tensor + 1, tensor)
        for name, tensor in tensors.items()
    }


def publish(writer: WeightWriter, version: int, tensors: Mapping[str, Tensor]) -> WeightRef:
    return WeightRef(version=version, parts=(writer.write(version, tensors),))


def check_served(server: Server, expected: Mapping[str, Tensor]) -> None:
    assert not server.engine.health()
    check_tensors(server, expected)


def check_tensors(server: Server, expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(server.model.get_parameter(name), tensor), name


@pytest.mark.parametrize("transport", SENT)
def test_servers_that_join_late_miss_a_version_or_start_again_apply_deltas(
    tmp_path: Path, transport: str, start: Callable[[], Server]
) -> None:
    current, codecs, servers = weights(1), list[str](), [start()]
    with trainer(tmp_path, transport, "delta") as writer:
        for version in range(1, 8):
            ref = publish(writer, version, current)
            codecs.append(ref.parts[0].codec)
            if version == 3:
                servers.append(start())
            if version == 7:
                servers[0].start_again()
            for server in servers:
                if version != 6 or server is not servers[1]:
                    server.pull(ref)
                    check_served(server, current)
            current = stepped(current, version)
    assert codecs == ["raw", "delta", "delta", "delta", "raw", "delta", "delta"]


@pytest.mark.parametrize("transport", SENT)
def test_deltas_of_a_run_are_not_applied_to_the_version_of_another_run_at_the_same_server(
    tmp_path: Path, transport: str, start: Callable[[], Server]
) -> None:
    """Both runs begin with equal weights and count their versions alike. Neither sends what it believes to be read."""
    server = start()
    first, second = server.engine, server.connect()
    with trainer(tmp_path / "a", transport, "delta") as one, trainer(tmp_path / "b", transport, "delta") as other:
        held: dict[str, Tensor] = {}
        current = {"a": weights(1), "b": weights(1)}
        num_lost = 0
        for version in range(1, 8):
            for name, writer, engine in (("a", one, first), ("b", other, second)):
                ref = publish(writer, version, current[name])
                engine.pull_weights(ref, "recompute", WeightReader())
                if engine.health():  # the server has refused the delta, and serves what it served
                    num_lost += 1
                    check_tensors(server, held)
                    assert not engine.recover()
                    engine.pull_weights(ref, "recompute", WeightReader())
                assert not engine.health()
                held = current[name]
                check_tensors(server, held)
                current[name] = stepped(held, version + (100 if name == "b" else 0))
        assert num_lost >= 8


def test_tensors_of_every_type_are_written_for_a_server() -> None:
    given = {name: torch.ones(size + 1).to(getattr(torch, name)) for size, name in enumerate(ITEM_BYTES)}
    folders = VersionFolders()
    try:
        found = dict(SavedWeights(folders.write(given, None)))
        assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in given.items()}
        assert all(torch.equal(found[name].double(), tensor.double()) for name, tensor in given.items())
    finally:
        folders.close()


def test_a_version_whose_tensors_are_made_when_they_are_read_is_written_whole(tmp_path: Path) -> None:
    """A tensor at the address of one that was freed counted as tied to it, and was left out."""
    given = {f"layers.{place}.weight": torch.full((64, 64), float(place)) for place in range(8)}
    folders = VersionFolders()
    with trainer(tmp_path, "object_store", "cast") as writer, WeightReader().open(publish(writer, 1, given)) as read:
        found = dict(SavedWeights(folders.write(read, None)))
        folders.close()
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists the mapped files of Linux")
def test_a_server_serves_from_the_folder_that_the_run_wrote_for_it(tmp_path: Path, start: Callable[[], Server]) -> None:
    """A copy delayed the running requests. The files of another folder may be written over, so they are copied."""
    server = start()
    for version in (1, 2):
        server.engine.update_weights(weights(version), version, "keep")
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if PREFIX in line}
        assert mapped == {str(server.engine._folders._written[-1] / NAME)}, "also: the version before is not held"
        assert all(parameter.data_ptr() % 64 == 0 for parameter in server.model.parameters())
        check_served(server, weights(version))
    server.engine._folders.close()
    check_served(server, weights(2))
    load_model(MODEL.model_copy(update={"seed": 3})).model.save_pretrained(tmp_path)
    server.engine.load(tmp_path, 3, "keep")
    assert not any(str(tmp_path) in line or PREFIX in line for line in Path("/proc/self/maps").read_text().splitlines())
    check_served(server, weights(3))


@pytest.mark.parametrize("codec", ["raw", "cast", "int8"])
@pytest.mark.parametrize("transport", [*SENT, "shared_memory"])
def test_every_codec_brings_to_a_server_what_it_brings_to_an_engine_in_process(
    tmp_path: Path, transport: str, codec: str, start: Callable[[], Server]
) -> None:
    server, reader = start(), WeightReader()
    with trainer(tmp_path, transport, codec) as writer:
        for version in (1, 2, 3):
            ref = publish(writer, version, weights(version))
            server.pull(ref)
            with reader.open(ref) as found:
                expected = {name: tensor.clone() for name, tensor in found.items()}
            check_served(server, expected)
        reader.close()
    check_served(server, expected)  # also after the end of the trainer


def test_only_the_changes_since_the_version_that_a_server_has_read_are_stored_for_it(tmp_path: Path) -> None:
    current, folders = weights(1), VersionFolders()
    with trainer(tmp_path, "object_store", "delta") as writer:
        for version in (1, 2, 3):
            ref = publish(writer, version, current)
            current = stepped(current, version)
        sizes = []
        for read in (None, 1, 2, 3):  # 3 is the version itself, which no delta is applied to
            stored = folders.store_tensors(ref, read)
            sizes.append(sum(file.stat().st_size for file in folders._written[-1].rglob("*.safetensors")))
            assert [part.version for part in stored.parts[0].behind] == {1: [1, 2], 2: [2]}.get(read or 0, [1, 2])
        folders.close()
    whole = sum(tensor.nbytes for tensor in current.values())
    assert sizes[0] > whole and sizes[1] < whole / 4 and sizes[2] < sizes[1] and sizes[3] == sizes[0]


def test_a_version_that_the_server_cannot_see_is_refused_with_the_transport_that_brings_it(
    tmp_path: Path, start: Callable[[], Server]
) -> None:
    server, first = start(), weights(1)
    with trainer(tmp_path, "folder", "cast") as writer:
        ref = publish(writer, 1, first)
        shutil.rmtree(tmp_path / "versions")
        with pytest.raises(UserError, match=r"is not on this machine.*weights\.transport=gloo"):
            server.pull(ref)
    check_served(server, weights(MODEL.seed))


def test_a_text_that_is_not_a_manifest_is_refused() -> None:
    part: JSON = {
        "version": 1,
        "rank": 0,
        "shards": [],
        "transport": "alias",
        "codec": "raw",
        "source": {},
        "checksum": "",
        "chain_hash": "",
    }
    texts: list[JSON] = [{}, [], {"version": 1, "parts": [{}]}, {"version": 1, "parts": [part]}]
    for text in texts:
        with pytest.raises(UserError, match="is not the manifest of a version"):
            read_manifest(text)
