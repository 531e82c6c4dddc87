"""Changes of a run's engines by its file of addresses and by commands."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.engines.rollout.config import AddressConfig
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.rollout.kinds.address import AddressKind, resolve_urls
from interlace.engines.rollout.services.protocol import ServiceError
from interlace.rollouts.role_groups import RolloutGroup
from interlace.run import engine_control
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.run.engine_control import EngineCommand, EngineControl, read_members
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from tests.support.episode_runs import OneEngine


def test_a_server_that_was_added_to_the_file_while_the_run_started_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "LOOK_EVERY_S", 0)
    listed = tmp_path / "urls"
    asked: list[tuple[int, str | None]] = []

    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine().pool(cluster, 1)
        listed.write_text("http://b:2\nhttp://a:1\n")  # it had the second address, for which one engine was started

        async def launch(number: int, url: str | None) -> RolloutGroup:
            asked.append((number, url))
            other = await OneEngine().pool(cluster, 1)
            return other.drivers[0].group

        kind = create_kind(AddressConfig(urls_file=str(listed)))
        control = EngineControl(pool, tmp_path / "engines", kind, launch, urls=["http://a:1"])
        cluster.spawn(control.run(), name="engine control")
        while len(pool.drivers) < 2:
            await asyncio.sleep(0)
        await _wait_turns(20)
        assert asked == [(1, "http://b:2")]

    asyncio.run(asyncio.wait_for(run_on(ClusterConfig(devices="cpu:1"), Schedule(), flow), 60))


def test_an_empty_file_that_is_being_written_drains_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_control, "LOOK_EVERY_S", 0)  # one look in each turn of the event loop
    listed = tmp_path / "urls"
    listed.write_text("http://a:1\n")

    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine().pool(cluster, 1)
        notes: list[str] = []
        pool.membership.notes.follow(notes.append)

        async def launch(number: int, url: str | None) -> RolloutGroup:
            raise UserError(f"no server is added: {number}, {url}")

        kind = create_kind(AddressConfig(urls_file=str(listed)))
        control = EngineControl(pool, tmp_path / "engines", kind, launch, urls=["http://a:1"])
        cluster.spawn(control.run(), name="engine control")
        await _wait_turns(20)
        listed.write_text("")
        await _wait_turns(1)
        listed.write_text("http://a:1\n")
        await _wait_turns(20)
        assert notes == []
        listed.write_text("")
        await _wait_turns(20)
        assert notes == ["drain http://a:1: rollout/0 is the last engine: add another before it leaves."]

    asyncio.run(asyncio.wait_for(run_on(ClusterConfig(devices="cpu:1"), Schedule(), flow), 60))


def test_servers_join_and_leave_with_the_addresses_of_a_dns_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "LOOK_EVERY_S", 0)
    hosts = ["10.0.0.1", "10.0.0.2"]

    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if not hosts:
            raise socket.gaierror(f"no name server answers for {host}")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine().pool(cluster, 1)
        started: list[str | None] = []

        async def launch(_: int, url: str | None) -> RolloutGroup:
            started.append(url)
            return (await OneEngine().pool(cluster, 1)).drivers[0].group

        async def wait_for_engines(number: int) -> None:
            while len(pool.drivers) != number:
                await asyncio.sleep(0.01)

        kind = create_kind(AddressConfig(urls_dns="http://engines.default.svc:8000"))
        assert isinstance(kind, AddressKind)
        control = EngineControl(pool, tmp_path / "engines", kind, launch, urls=kind.urls)
        cluster.spawn(control.run(), name="engine control")
        await wait_for_engines(2)
        hosts.clear()  # the name server is away: no engine leaves
        await asyncio.sleep(0.2)
        assert len(pool.drivers) == 2
        hosts.append("10.0.0.2")
        await wait_for_engines(1)
        assert pool.drivers[0].group.name == "rollout/1"
        hosts.append("10.0.0.3")
        await wait_for_engines(2)
        assert started == ["http://10.0.0.3:8000"]

    asyncio.run(asyncio.wait_for(run_on(ClusterConfig(devices="cpu:2"), Schedule(), flow), 60))


def test_a_dns_name_gives_one_address_per_ip_address() -> None:
    assert resolve_urls("http://localhost:8000") == ("http://127.0.0.1:8000",)
    with pytest.raises(UserError, match=r"rollout.urls_dns = 'http://no-host.invalid:8000': the host is unknown"):
        resolve_urls("http://no-host.invalid:8000")
    for wrong in ("http://localhost:80000", "http://engines..svc:8000", f"http://{'engines' * 10}:8000"):
        with pytest.raises(UserError, match=r"rollout.urls_dns = '.*' is not an address: .* Write http://NAME:PORT"):
            resolve_urls(wrong)


def test_commands_whose_senders_gave_up_do_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_control, "LOOK_EVERY_S", 0)
    commands = tmp_path / "engines" / "commands"
    commands.mkdir(parents=True)
    for number in (1, 2):
        text = json.dumps({"verb": "add", "engine": str(number)})
        (commands / f"{number}.json").write_text(text)

    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine().pool(cluster, 1)

        async def launch(number: int, _: str | None) -> RolloutGroup:
            for file in commands.glob("*.json"):  # as `interlace engines` does when it has waited too long
                file.unlink()
            other = await OneEngine().pool(cluster, 1)
            return other.drivers[0].group

        cluster.spawn(EngineControl(pool, commands.parent, None, launch).run(), name="engine control")
        while len(pool.drivers) < 2:
            await asyncio.sleep(0)
        await _wait_turns(20)
        assert len(pool.drivers) == 2
        assert not list(commands.glob("2.*"))

    asyncio.run(asyncio.wait_for(run_on(ClusterConfig(devices="cpu:1"), Schedule(), flow), 60))


def test_a_listed_server_that_does_not_answer_is_tried_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(engine_control, "FIRST_RETRY_S", 0.01)
    listed = tmp_path / "urls"
    listed.write_text("http://a:1\nhttp://b:2\n")
    asked: list[str | None] = []

    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine().pool(cluster, 1)
        notes: list[str] = []
        pool.membership.notes.follow(notes.append)

        async def launch(_: int, url: str | None) -> RolloutGroup:
            asked.append(url)
            if len(asked) < 3:
                raise ServiceError(f"{url} does not answer")
            other = await OneEngine().pool(cluster, 1)
            return other.drivers[0].group

        kind = create_kind(AddressConfig(urls_file=str(listed)))
        control = EngineControl(pool, tmp_path / "engines", kind, launch, urls=["http://a:1"])
        cluster.spawn(control.run(), name="engine control")
        while len(pool.drivers) < 2:
            await asyncio.sleep(0)
        await _wait_turns(20)
        assert asked == ["http://b:2"] * 3
        assert [note.partition(" It ")[0] for note in notes[:2]] == ["add http://b:2: http://b:2 does not answer"] * 2

    asyncio.run(asyncio.wait_for(run_on(ClusterConfig(devices="cpu:1"), Schedule(), flow), 60))


def test_the_last_server_is_drained_when_the_one_that_replaces_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(engine_control, "FIRST_RETRY_S", 0.05)
    listed = tmp_path / "urls"
    listed.write_text("http://a:1\n")

    async def flow(cluster: Cluster) -> None:
        pool, other = await OneEngine().pool(cluster, 1), await OneEngine().pool(cluster, 1)
        await pool.membership.remove(pool.drivers[1], drains=True)
        notes: list[str] = []
        pool.membership.notes.follow(notes.append)

        async def launch(_: int, __: str | None) -> RolloutGroup:
            if not notes:
                raise ServiceError("it is starting")
            return other.drivers[1].group

        kind = create_kind(AddressConfig(urls_file=str(listed)))
        control = EngineControl(pool, tmp_path / "engines", kind, launch, urls=["http://a:1"])
        cluster.spawn(control.run(), name="engine control")
        await _wait_turns(20)
        listed.write_text("http://b:2\n")
        while "rollout/0 has left" not in notes:
            await asyncio.sleep(0.01)
        assert len(pool.drivers) == 1
        assert [note for note in notes if "is the last engine" in note] == [
            "drain http://a:1: rollout/0 is the last engine: add another before it leaves."
        ]

    asyncio.run(asyncio.wait_for(run_on(ClusterConfig(devices="cpu:2"), Schedule(), flow), 60))


def test_the_engines_that_a_command_left_are_those_of_the_next_start(tmp_path: Path) -> None:
    async def flow(cluster: Cluster) -> None:
        pool = await OneEngine().pool(cluster, 1)

        async def launch(_: int, url: str | None) -> RolloutGroup:
            raise UserError(f"no engine is added: {url}")

        control = EngineControl(pool, tmp_path, None, launch, most_engines=2)
        assert read_members(tmp_path, 2) is None
        await control.execute(EngineCommand(verb="scale", engine="1"))
        assert read_members(tmp_path, 2) == (0,)
        assert read_members(tmp_path, 3) is None, "another placement"

    asyncio.run(asyncio.wait_for(run_on(ClusterConfig(devices="cpu:1"), Schedule(), flow), 60))


async def _wait_turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)
