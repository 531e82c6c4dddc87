"""The size of a KV cache from free memory: what bounds it, and that no result depends on it."""

import pytest
import torch

from interlace.core import host_memory
from interlace.core.errors import UserError
from interlace.core.types import SamplingParams
from interlace.engines.rollout import NativeEngine, kv_size
from interlace.engines.rollout.config import AUTO_TOKENS, KVNeeds, NativeConfig, VLLMConfig
from interlace.engines.rollout.kv_size import size_kv_cache
from interlace.models.size import model_size
from interlace.models.tiny import build_tiny

GIB = 1 << 30
CONTEXT = 256


def sized(free: int, monkeypatch: pytest.MonkeyPatch, needs: KVNeeds | None = None, **settings: int) -> int:
    monkeypatch.setattr(kv_size, "available_bytes", lambda: free)
    model, _ = build_tiny("micro", 0)
    return size_kv_cache(model, NativeConfig(**settings), needs or KVNeeds())[0].kv_tokens  # type: ignore[arg-type]


def test_a_given_size_is_kept() -> None:
    model, _ = build_tiny("micro", 0)
    assert size_kv_cache(model, NativeConfig(max_tokens=512), KVNeeds())[0].kv_tokens == 512
    assert VLLMConfig().kv_tokens == AUTO_TOKENS == NativeConfig().kv_tokens


def test_memory_the_context_and_a_limit_bound_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build_tiny("micro", 0)
    context, per_token = model.config.max_position_embeddings, model_size(model).kv_bytes_per_token
    assert sized(400 * per_token, monkeypatch) == 96, "a quarter, in blocks of 16"
    assert sized(64 * GIB, monkeypatch, max_running=3) == 2 * 3 * context
    assert sized(64 * GIB, monkeypatch, max_running=10**6) == AUTO_TOKENS
    with pytest.raises(UserError, match=r"longest sequence has 100 tokens.*cpu has .* Lower sampling.max_new_tokens"):
        sized(400 * per_token, monkeypatch, KVNeeds(longest=100))


def test_a_gpu_leaves_room_for_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build_tiny("micro", 0)
    size = model_size(model)
    free, total = 1000 * size.kv_bytes_per_token, 2000 * size.kv_bytes_per_token + size.weight_bytes
    monkeypatch.setattr(kv_size, "_measure_gpu", lambda _: (free, total))
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))

    def tokens(reserved: int, longest: int = 1) -> int:
        needs = KVNeeds(longest=longest, reserved_bytes=reserved * size.kv_bytes_per_token)
        return size_kv_cache(model, NativeConfig(), needs)[0].kv_tokens

    assert tokens(0) == 896, "0.9 of the free memory"
    assert tokens(1500) == 448, "0.9 of the rest"
    assert tokens(1990, longest=200) == 896, "the workers take turns"


def test_no_result_depends_on_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small cache suspends sequences; the samples are the same, and so is the longest sequence."""
    found = []
    for free in (64 * GIB, 4 * 80 * model_size(build_tiny("micro", 0)[0]).kv_bytes_per_token):
        monkeypatch.setattr(kv_size, "available_bytes", lambda free=free: free)
        model, tokenizer = build_tiny("micro", 0)
        engine = NativeEngine(
            model, config=NativeConfig(max_running=4), tokenizer=tokenizer, kv_needs=KVNeeds(longest=40)
        )
        assert any("rollout.max_tokens=auto" in note for note in engine.report().notes)
        done = engine.generate([[40 + row, 41, 42] for row in range(6)], SamplingParams(max_new_tokens=30))
        found.append([list(one.token_ids) for one in done])
    assert found[0] == found[1]


def test_a_container_bounds_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "meminfo": "MemTotal: 9 kB\nMemAvailable:   4096 kB\n",
        "memory.max": "3000000\n",
        "memory.current": "1000000",
    }
    monkeypatch.setattr(host_memory, "_read", lambda path: files.get(path.name, ""))
    assert host_memory.available_bytes() == 2_000_000
    files["memory.max"] = "max"
    assert host_memory.available_bytes() == 4096 << 10
    files.clear()
    assert host_memory.available_bytes() > 0
