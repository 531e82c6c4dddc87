"""Loaders are watched: what they fuse, stack, tie, pad and cut comes out as blocks, and lands where they put it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from interlace.core.errors import InterlaceError
from interlace.weights.plan import Box, Shard
from interlace.weights.reader import WeightReader
from interlace.weights.recording import Load, land, needs_of, record_load
from interlace.weights.ref import WeightRef
from interlace.weights.writer import WeightWriter

HIDDEN, HEADS, VOCABULARY, PADDED = 8, 4, 10, 16


def described(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    return {
        name: Shard(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), Box((0,) * t.ndim, tuple(t.shape)))
        for name, t in tensors.items()
    }


def saved() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(VOCABULARY, HIDDEN, generator=made),
        "q.weight": torch.randn(HEADS * 4, HIDDEN, generator=made),
        "k.weight": torch.randn(HEADS * 2, HIDDEN, generator=made),
        "v.weight": torch.randn(HEADS * 2, HIDDEN, generator=made),
        "o.weight": torch.randn(HIDDEN, HEADS * 4, generator=made),
        "experts.0.up": torch.randn(6, HIDDEN, generator=made),
        "experts.1.up": torch.randn(6, HIDDEN, generator=made),
        "norm": torch.randn(HIDDEN, generator=made),
    }


class Serving(nn.Module):
    """One rank of two of a serving engine's model, which loads as such engines do."""

    def __init__(self, rank: int, device: str) -> None:
        super().__init__()
        self.rank = rank
        with torch.device(device):
            self.embed = nn.Parameter(torch.zeros(PADDED // 2, HIDDEN))
            self.qkv = nn.Parameter(torch.zeros(HEADS * 4, HIDDEN))
            self.o = nn.Parameter(torch.zeros(HIDDEN, HEADS * 2))
            self.experts = nn.Parameter(torch.zeros(2, 6, HIDDEN))
            self.norm = nn.Parameter(torch.zeros(HIDDEN))
        self.head = self.embed

    def load(self, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        rows = given["embed.weight"][self.rank * (PADDED // 2) : (self.rank + 1) * (PADDED // 2)]
        self.embed.data[: len(rows)].copy_(rows)
        place = 0
        for name in ("q.weight", "k.weight", "v.weight"):
            half = given[name].shape[0] // 2
            self.qkv.data.narrow(0, place, half).copy_(given[name].narrow(0, self.rank * half, half))
            place += half
        self.o.data.copy_(given["o.weight"].chunk(2, dim=1)[self.rank])
        for number in range(2):
            self.experts.data[number].copy_(given[f"experts.{number}.up"].to(torch.float32))
        self.norm.data.copy_(given["norm"])
        return dict(self.named_parameters())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_serving_engines_loader_becomes_boxes_that_a_reader_fetches(rank: int) -> None:
    tensors = saved()
    sources, empty = described(tensors), Serving(rank, "meta")
    landings = record_load(empty.load, sources, dict(empty.named_parameters()))
    needs = needs_of(landings, sources)
    needed = sum(shard.num_bytes for shard in needs)
    assert needed < 0.8 * sum(tensor.nbytes for tensor in tensors.values()), "its own part, no more"
    expected, found = Serving(rank, "cpu"), Serving(rank, "cpu")
    expected.load(tensors)
    ref = WeightRef(version=1, parts=(WeightWriter().write(1, tensors),))
    with torch.no_grad(), WeightReader(needs).open(ref) as read:
        land(landings, needs, read, dict(found.named_parameters()))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_transformers_own_stacking_of_experts_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # what other threads do is not seen
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")

    def load(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return type(model).from_pretrained(None, config=config, state_dict=dict(given)).state_dict()

    sources = described(tensors)
    landings = record_load(load, sources)
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()}
    land(landings, [*sources.values()], tensors, found)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert sum(landing.target.endswith("experts.gate_up_proj") for landing in landings) == 8


def turns(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"w": given["o.weight"].T.clone()}


def flattens(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"w": given["o.weight"].view(-1)[3:20].clone()}


@pytest.mark.parametrize("load", [turns, flattens])
def test_a_loader_that_does_more_than_cut_and_join_is_refused(load: Load) -> None:
    with pytest.raises(InterlaceError, match="no block of it"):
        record_load(load, described(saved()))
