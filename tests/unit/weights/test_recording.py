"""Traced loaders: fused, stacked, tied, padded and split tensors are recorded as blocks and placed correctly."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from interlace.core.errors import InterlaceError, UserError
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.observe.checkpoints import write_manifest
from interlace.weights.plan import Box, Shard
from interlace.weights.recording import Landing, Load, join_landed, record_load
from interlace.weights.saved import LandedWeights, SavedWeights, load_without_content, trace_load

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
def test_a_serving_engines_loader_becomes_blocks_that_are_read(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = saved()
    save_file(tensors, tmp_path / "model.safetensors")
    folder, empty = SavedWeights(tmp_path), Serving(rank, "meta")
    landings = record_load(empty.load, folder.shards, dict(empty.named_parameters()))
    expected = Serving(rank, "cpu")
    expected.load(tensors)
    filled = {landing.target for landing in landings}
    assert filled == set(dict(expected.named_parameters()))
    read: list[int] = []
    own = SavedWeights.read
    monkeypatch.setattr(SavedWeights, "read", lambda self, *args: noted(own(self, *args), read))
    rows = VOCABULARY - PADDED // 2 if rank else PADDED // 2  # what is behind them is padding, which nothing fills
    needs = [
        shard._replace(box=Box((0, 0), (rows, HIDDEN))) if name == "embed" else shard
        for name, shard in described(dict(expected.named_parameters())).items()
    ]
    found = dict(LandedWeights(folder, landings, needs).items())
    for shard in needs:
        assert torch.equal(found[shard.name], expected.state_dict()[shard.name][shard.box.slices]), shard.name
    assert sum(read) < 0.8 * sum(tensor.numel() for tensor in tensors.values()), "its own part, no more"


def noted(tensor: Tensor, read: list[int]) -> Tensor:
    read.append(tensor.numel())
    return tensor


def test_a_folder_that_lacks_some_of_a_model_is_refused(tmp_path: Path) -> None:
    tensors = saved()
    save_file(tensors, tmp_path / "model.safetensors")
    folder, empty = SavedWeights(tmp_path), Serving(0, "meta")
    landings = record_load(empty.load, folder.shards, dict(empty.named_parameters()))
    some, needs = [one for one in landings if one.target != "norm"], [*described({"norm": empty.norm}).values()]
    with pytest.raises(UserError, match=r"lacks 1 weights \(norm"):
        LandedWeights(folder, some, needs)


def test_transformers_own_stacking_of_experts_is_recorded(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    folder = SavedWeights(tmp_path)
    empty, landings = trace_load(type(model), config, folder, torch.float32)
    assert all(parameter.is_meta for parameter in empty.parameters())
    found = LandedWeights(folder, landings, [*described(model.state_dict()).values()])
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert sum(landing.target.endswith("experts.gate_up_proj") for landing in landings) == 8


def test_a_folder_gives_a_model_without_content_and_one_that_lacks_weights_is_loaded_whole(tmp_path: Path) -> None:
    whole = load_model(ModelConfig(path="tiny:micro"))
    whole.model.save_pretrained(tmp_path)
    whole.tokenizer.save_pretrained(tmp_path)
    found = load_without_content(ModelConfig(path=str(tmp_path)), is_checked=True)
    assert found is not None
    loaded, reader = found
    assert loaded.stop_token_ids == whole.stop_token_ids
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    loaded.model._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
    reader.fill(loaded.model)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert load_without_content(ModelConfig(path="tiny:micro"), is_checked=True) is None
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(dict([*tensors.items()][1:]), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_without_content(ModelConfig(path=str(tmp_path)), is_checked=True) is None, (
        "its error is that of loading it whole"
    )


def test_the_rank_that_checks_notices_a_flipped_bit_where_a_model_is_read_in_parts(tmp_path: Path) -> None:
    whole = load_model(ModelConfig(path="tiny:micro"))
    whole.model.save_pretrained(tmp_path)
    whole.tokenizer.save_pretrained(tmp_path)
    write_manifest(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-8] ^= 1
    weights.write_bytes(content)
    assert load_without_content(ModelConfig(path=str(tmp_path)), is_checked=True) is None


def turns(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"w": given["o.weight"].T.clone()}


def flattens(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"w": given["o.weight"].view(-1)[3:20].clone()}


@pytest.mark.parametrize("load", [turns, flattens])
def test_a_loader_that_does_more_than_cut_and_join_is_refused(load: Load) -> None:
    with pytest.raises(InterlaceError, match="no block of it"):
        record_load(load, described(saved()))


def test_a_block_of_which_an_element_has_no_content_is_refused() -> None:
    whole = Box((0, 0), (2, 3))
    half = Landing("saved", Box((0, 0), (1, 3)), "model", Box((0, 0), (1, 3)))
    for landings in ([half], []):
        with pytest.raises(InterlaceError, match="has no content for some of its elements"):
            join_landed(whole, landings, [torch.ones(1, 3) for _ in landings], torch.float32)
    assert join_landed(Box((0,), (0,)), [], [], torch.float32).shape == (0,)
