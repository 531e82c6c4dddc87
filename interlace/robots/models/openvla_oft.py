"""OpenVLA-OFT (arXiv 2502.19645): a chunk is decoded in one pass with bidirectional attention.

In addition to OpenVLA's files, a folder contains `action_head--STEP_checkpoint.pt` (actions by regression),
`proprio_projector--STEP_checkpoint.pt` (the robot's state as a token) and `dataset_statistics.json`.

The sequence is: first token, patches of all pictures, state, rest of the prompt, one empty placeholder for each number
of the chunk, stop token. The output for a number is read one position before its placeholder. So the queries of an
answer are the prompt's last token and all placeholders but the last one; the body adds the remaining two tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from interlace.core.errors import UserError

STATISTICS = "dataset_statistics.json"
PART = re.compile(r"(?P<part>\w+)--(?P<step>\d+|latest)_checkpoint\.pt")
HEAD, PROPRIO = "action_head", "proprio_projector"
UNSUPPORTED = {
    "noisy_action_projector": "a diffusion action head",
    "vision_backbone": "image towers that read the instruction (FiLM)",
}
SPACE_TOKEN = 29871
"""Last token of a prompt, in Llama's vocabulary."""
NUM_BLOCKS = 2
"""Residual blocks of the action head."""
NUM_ADDED = 2
"""Number of tokens that the body adds: the last placeholder and the stop token."""


CHUNKS: Mapping[str, int] = {"libero": 8, "bridge": 5, "aloha": 25}
"""Word in the name of the data set -> actions of a chunk, which OpenVLA-OFT fixes for a robot."""
NUM_IMAGES: Mapping[str, int] = {"aloha": 3}
"""Word in the name of the data set -> cameras, if they are not the usual two."""


def find_parts(folder: Path) -> dict[str, Path]:
    """Returns the newest file of each OpenVLA-OFT part in a folder. Raises UserError for unsupported parts."""
    found: dict[str, tuple[int, Path]] = {}
    for file in sorted(folder.glob("*--*_checkpoint.pt")):
        match = PART.fullmatch(file.name)
        if match is None:
            continue
        step = int(match["step"]) if match["step"].isdigit() else 1 << 60
        if match["part"] not in found or step > found[match["part"]][0]:
            found[match["part"]] = step, file
    for part, (_, file) in found.items():
        if part in UNSUPPORTED:
            raise UserError(
                f"the policy's folder has {file.name}, which belongs to {UNSUPPORTED[part]}: this layout is not "
                "supported. Take a folder with an L1 action head, or with action tokens."
            )
    return {part: file for part, (_, file) in found.items()}


def read_statistics(folder: Path) -> dict[str, object]:
    """Returns the statistics that OpenVLA-OFT stores in a separate file; empty without the file."""
    file = folder / STATISTICS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def find_number(numbers: Mapping[str, int], data_sets: Sequence[str]) -> int | None:
    """Returns the number of the first data set whose name determines it. numbers: such as CHUNKS."""
    for name in data_sets:
        for word, number in numbers.items():
            if word in name.lower():
                return number
    return None


def load_part(file: Path) -> dict[str, Tensor]:
    """Reads the weights of a part. Only tensors are unpickled."""
    loaded: Mapping[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return {name.removeprefix("module."): tensor for name, tensor in loaded.items()}


def part_shapes(file: Path) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of a part's weights. An unchanged file is read once."""
    return _read_shapes(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read_shapes(file: Path, _changed_ns: int) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_part(file).items()}


class ProprioProjector(nn.Module):
    """Embeds the robot's state as one token."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, hidden), nn.Linear(hidden, hidden)

    def forward(self, state: Tensor) -> Tensor:
        """Computes [N, 1, hidden] from [N, size]."""
        return self.fc2(F.gelu(self.fc1(state.to(self.fc1.weight.dtype))))[:, None]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class _Regression(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(inputs), nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList([_Block(width) for _ in range(NUM_BLOCKS)])
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class RegressionHead(nn.Module):
    """Regression of actions from the hidden states of a chunk, with a learned standard deviation for RL.

    The folder's head is deterministic and provides the means. A published folder contains no `log_std`, which starts at
    the configuration's `action_log_std`.
    """

    def __init__(self, hidden: int, size: int, width: int, log_std: float) -> None:
        super().__init__()
        self.model = _Regression(hidden * size, width, size)
        self.log_std = nn.Parameter(torch.full((size,), log_std))

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes mean and log standard deviation [..., K A, 2] from hidden states [..., K A, H]."""
        size = len(self.log_std)
        of_actions = hidden.unflatten(-2, (-1, size)).flatten(-2)
        mean = self.model(of_actions)
        return torch.stack([mean, self.log_std.to(mean.dtype).expand_as(mean)], -1).flatten(-3, -2)


class BidirectionalLlama(LlamaModel):
    """Llama body whose attention is bidirectional if the configuration is OpenVLA-OFT's."""

    def forward(  # house: the signature is transformers'
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: object | None = None,
        use_cache: bool | None = None,
        **others: object,
    ) -> BaseModelOutputWithPast:
        """Runs the body. Raises ValueError for a cache, which bidirectional attention cannot use."""
        if not self.config.parallel_decoding:
            return super().forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                inputs_embeds=inputs_embeds, past_key_values=past_key_values, use_cache=use_cache, **others,
            )  # fmt: skip
        if use_cache or past_key_values is not None or others.get("packed_layout") is not None:
            raise ValueError("attention in both directions needs whole rows: it has neither cache nor packed rows")
        rows = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        count, length = rows.shape[:2]
        real = attention_mask if attention_mask is not None else rows.new_ones(count, length, dtype=torch.long)
        positions = torch.arange(length, device=rows.device).expand(count, -1) if position_ids is None else position_ids
        added = self.embed_tokens(rows.new_tensor([self.config.zero_token_id, self.config.eos_token_id]).long())
        after = real.sum(1, keepdim=True) + torch.arange(NUM_ADDED, device=rows.device)
        keys = torch.cat([real.bool(), real.new_ones(count, NUM_ADDED).bool()], 1)
        mask = torch.zeros(count, 1, 1, length + NUM_ADDED, dtype=rows.dtype, device=rows.device)
        mask = mask.masked_fill(~keys[:, None, None], torch.finfo(rows.dtype).min)
        found: BaseModelOutputWithPast = super().forward(
            inputs_embeds=torch.cat([rows, added.expand(count, -1, -1)], 1),
            attention_mask=mask.expand(-1, -1, length + NUM_ADDED, -1),
            position_ids=torch.cat([positions, after], 1),
            use_cache=False,
        )
        assert found.last_hidden_state is not None
        found.last_hidden_state = found.last_hidden_state[:, :length]
        return found


def spread_over_queries(head: RegressionHead, hidden: Tensor, lengths: Tensor, num_queries: int) -> Tensor:
    """Computes [B, L, 2]: a head's outputs at the last `num_queries` tokens of each row, 0 elsewhere.

    hidden: [B, L, H]. lengths: [B] tokens of a row without its padding. A row shorter than an answer, such as a probe,
    gets 0.
    """
    # A product, not new_zeros(): rows without queries stay in the gradient's graph, so that a backward pass runs.
    found = hidden[..., :2] * 0
    pieces = list(found)
    for row, length in enumerate(lengths.tolist()):
        if length >= num_queries:
            first = length - num_queries
            outputs = head(hidden[row, first:length])
            pieces[row] = torch.cat([found[row, :first], outputs, found[row, length:]])
    return torch.stack(pieces)
