"""A stand-in of the Hugging Face hub: the HTTP routes by which `huggingface_hub` uploads a folder without Xet.

Repositories of each kind have their own names, as on the hub. Weights are sent by git LFS (basic transfers). The routes
and answers follow the client's source (`hf_api.py`, `_commit_api.py`, `lfs.py` of huggingface_hub 2.4).
"""

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import yaml
from aiohttp import web

Handler: TypeAlias = Callable[[web.Request], Coroutine[None, None, web.StreamResponse]]
OWNER, WRITER, READER = "me", "hf_writer", "hf_reader"
LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")
MAX_BYTES = 1 << 30


@dataclass
class Repository:
    """Files of one repository, and the messages of its commits."""

    visibility: str = "public"
    files: dict[str, bytes] = field(default_factory=dict)
    lfs_paths: set[str] = field(default_factory=set)
    """Paths of the files that came by LFS."""
    messages: list[str] = field(default_factory=list)

    @property
    def commit_id(self) -> str:
        """Returns the id of the newest commit."""
        return hashlib.sha1(repr((self.messages, sorted(self.files))).encode()).hexdigest()

    def identify(self, path: str) -> str | None:
        """Returns the id by which the client recognizes an unchanged file: of git, or the SHA-256 of an LFS object."""
        content = self.files.get(path)
        if content is None:
            return None
        return hashlib.sha256(content).hexdigest() if path in self.lfs_paths else _blob_id(content)


@dataclass
class Hub:
    """State of the stand-in."""

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    """By kind (model, dataset, space) and id."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """LFS objects by SHA-256."""

    def application(self) -> web.Application:
        """Returns the server."""
        app = web.Application(client_max_size=MAX_BYTES)
        repository = "{owner}/{name}"
        app.add_routes(
            [
                web.get("/api/whoami-v2", self._whoami),
                web.post("/api/repos/create", self._create),
                web.post("/api/validate-yaml", self._validate_card),
                web.get(f"/api/models/{repository}", self._describe),
                web.get(f"/api/models/{repository}/revision/main", self._describe),
                web.get(f"/api/models/{repository}/tree/main", self._list_files),
                web.post(f"/api/models/{repository}/preupload/main", self._preupload),
                web.post(f"/{repository}.git/info/lfs/objects/batch", self._lfs_batch),
                web.put("/lfs/{oid}", self._lfs_upload),
                web.post("/lfs/{oid}/verify", self._lfs_verify),
                web.post(f"/api/models/{repository}/commit/main", self._commit),
            ]
        )
        return app

    async def _whoami(self, request: web.Request) -> web.StreamResponse:
        if _token(request) not in (WRITER, READER):
            return _refuse(401, "Invalid username or password.")
        return web.json_response({"type": "user", "name": OWNER, "orgs": []})

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        owner, kind = body["organization"] or OWNER, body.get("type", "model")
        if _token(request) != WRITER or owner != OWNER:
            told = f'You don\'t have the rights to create a {kind} under the namespace "{owner}".'
            return _refuse(403, told)
        key = (kind, f"{owner}/{body['name']}")
        if key in self.repositories:
            told = f"You already created this {kind} repo: {key[1]}"
            return web.json_response({"error": told, "url": f"{self.url}/{key[1]}"}, status=409)
        self.repositories[key] = Repository(visibility=body.get("visibility", "public"))
        return web.json_response({"url": f"{self.url}/{key[1]}", "id": key[1]})

    async def _validate_card(self, request: web.Request) -> web.StreamResponse:
        card = (await request.json())["content"]
        errors = [] if card.startswith("---\n") else [{"message": "The card has no metadata."}]
        return web.json_response({"errors": errors, "warnings": []}, status=400 if errors else 200)

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        found = self._find(request)
        if found is None:
            return _repository_not_found()
        card = found.files.get("README.md", b"").decode().split("---\n")
        tags = (yaml.safe_load(card[1]) or {}).get("tags", []) if len(card) > 2 else []
        name = "{owner}/{name}".format(**request.match_info)
        siblings = [{"rfilename": path} for path in found.files]
        return web.json_response(
            {"_id": name, "id": name, "modelId": name, "sha": found.commit_id, "tags": tags, "siblings": siblings}
        )

    async def _list_files(self, request: web.Request) -> web.StreamResponse:
        found = self._find(request)
        if found is None:
            return _repository_not_found()
        files = [
            {"type": "file", "path": path, "size": len(content), "oid": found.identify(path)}
            for path, content in found.files.items()
        ]
        return web.json_response(files)

    async def _preupload(self, request: web.Request) -> web.StreamResponse:
        found = self._find(request)
        if found is None:
            return _repository_not_found()
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": found.identify(file["path"]),
            }
            for file in (await request.json())["files"]
        ]
        return web.json_response({"files": modes})

    async def _lfs_batch(self, request: web.Request) -> web.StreamResponse:
        if self._find(request) is None:
            return _repository_not_found()
        body = await request.json()
        assert body["operation"] == "upload" and "basic" in body["transfers"]
        objects = []
        for each in body["objects"]:
            actions = {
                "upload": {"href": f"{self.url}/lfs/{each['oid']}"},
                "verify": {"href": f"{self.url}/lfs/{each['oid']}/verify"},
            }
            objects.append(each if each["oid"] in self.objects else {**each, "actions": actions})
        return web.json_response({"transfer": "basic", "objects": objects})

    async def _lfs_upload(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        if hashlib.sha256(content).hexdigest() != request.match_info["oid"]:
            return _refuse(400, "The content has another SHA-256.")
        self.objects[request.match_info["oid"]] = content
        return web.Response()

    async def _lfs_verify(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_whole = len(self.objects.get(body["oid"], b"")) == body["size"]
        return web.Response() if is_whole else _refuse(404, "The object is missing.")

    async def _commit(self, request: web.Request) -> web.StreamResponse:
        found = self._find(request)
        if found is None:
            return _repository_not_found()
        if _token(request) != WRITER:
            return _refuse(403, "Forbidden: this token may only read.")
        for line in (await request.text()).splitlines():
            part = json.loads(line)
            self._apply(found, part["key"], part["value"])
        oid = found.commit_id
        name = "{owner}/{name}".format(**request.match_info)
        return web.json_response({"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid})

    def _apply(self, found: Repository, key: str, value: dict[str, str]) -> None:
        match key:
            case "header":
                found.messages.append(value["summary"])
            case "file":
                found.files[value["path"]] = base64.b64decode(value["content"])
                found.lfs_paths.discard(value["path"])
            case "lfsFile":
                found.files[value["path"]] = self.objects[value["oid"]]
                found.lfs_paths.add(value["path"])
            case "deletedFile":
                del found.files[value["path"]]
                found.lfs_paths.discard(value["path"])
            case _:
                raise ValueError(f"unknown part of a commit: {key}")

    def _find(self, request: web.Request) -> Repository | None:
        """Returns the model's repository that the path names; a reader without rights would get the same answer."""
        if _token(request) not in (WRITER, READER):
            return None
        return self.repositories.get(("model", "{owner}/{name}".format(**request.match_info)))


@contextmanager
def open_hub() -> Iterator[Hub]:
    """Serves an empty hub on a free port of this machine, on a thread."""
    hub, loop = Hub(), asyncio.new_event_loop()
    runner = web.AppRunner(hub.application())

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield hub
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _token(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _refuse(status: int, told: str, **headers: str) -> web.Response:
    return web.json_response({"error": told}, status=status, headers={"X-Error-Message": told, **headers})


def _repository_not_found() -> web.Response:
    return _refuse(404, "Repository not found", **{"X-Error-Code": "RepoNotFound"})


def _blob_id(content: bytes) -> str:
    """Returns the id that git gives to a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
