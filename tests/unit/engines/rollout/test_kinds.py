"""The kinds of engines state what their engines use."""

import secrets
import tempfile
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.engines.rollout.config import InterlaceConfig, VLLMConfig
from interlace.engines.rollout.kinds import EngineSite, create_kind, parse_engine
from interlace.engines.rollout.kinds.base import ServerSite, describe_model
from interlace.engines.rollout.kinds.interlace import InterlaceKind
from interlace.engines.rollout.kinds.vllm import VLLMKind
from interlace.engines.rollout.services.process import ServerCommand
from interlace.engines.rollout.services.protocol import Address
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.models.size import model_size
from tests.unit.engines.train.models import tiny_model


class WithoutCommand(InterlaceKind):
    """A kind that fails after the model was saved."""

    def command(self, server: ServerSite) -> ServerCommand:
        assert any(server.folder.iterdir())
        raise UserError("there is no command")


def test_a_served_native_engine_has_one_device() -> None:
    with pytest.raises(UserError, match=r"tensor_parallel_size = 2, .* one device; set it to 1"):
        parse_engine({"engine": "interlace", "tensor_parallel_size": 2})
    assert create_kind(InterlaceConfig()).num_devices("cuda") == 1


def test_a_server_that_cannot_be_started_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = ModelConfig(path="tiny:micro")
    site = EngineSite(model=model, devices=("cpu",), seed=0, num_threads=1)
    with pytest.raises(UserError, match="no command"):
        WithoutCommand(InterlaceConfig()).create(load_model(model), site)
    assert not list(tmp_path.iterdir())


def test_the_key_of_a_server_can_be_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's server gets it on the command line, and refuses one with a leading dash."""
    keys = list[str]()

    class KeepsKey(InterlaceKind):
        def command(self, server: ServerSite) -> ServerCommand:
            keys.append(server.address.key)
            raise UserError("there is no command")

    monkeypatch.setattr(secrets, "token_urlsafe", lambda num_bytes: "-" + "a" * num_bytes)
    model = ModelConfig(path="tiny:micro")
    site = EngineSite(model=model, devices=("cpu",), seed=0, num_threads=1)
    with pytest.raises(UserError, match="no command"):
        KeepsKey(InterlaceConfig()).create(load_model(model), site)
    [key] = keys
    assert key[0] != "-" and len(key) >= 32


def test_a_model_that_was_saved_for_a_server_is_the_same_model(tmp_path: Path) -> None:
    """A rank in place of a killed one, or a run that resumes without a checkpoint, loads it without saving it."""
    loaded = load_model(ModelConfig(path="tiny:micro"))
    before = describe_model(loaded)
    loaded.model.save_pretrained(tmp_path)
    assert describe_model(loaded) == before
    assert describe_model(load_model(ModelConfig(path="tiny:mini"))) != before


def test_ranks_of_vllm_beyond_the_key_and_value_heads_hold_copies() -> None:
    """Each rank then needs the bytes of one head; with fewer, vLLM refuses to start."""
    model = tiny_model("llama")
    size, config = model_size(model), VLLMConfig(max_tokens=1280, tensor_parallel_size=4)
    site = EngineSite(model=ModelConfig(path="x"), devices=("cuda:0",), seed=0, num_threads=1)
    server = ServerSite(folder=Path("x"), site=site, address=Address(url="unix:/x"), size=size)
    arguments = [*VLLMKind(config).command(server).arguments]
    num_bytes = int(arguments[arguments.index("--kv-cache-memory-bytes") + 1])
    assert num_bytes == (1280 + 128) * size.kv_bytes_per_token // model.config.num_key_value_heads
