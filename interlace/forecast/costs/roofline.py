"""Roofline profiles of devices that need not be present, from data sheets; every output labels them as such."""

from dataclasses import dataclass

from interlace.forecast.costs.sheets import DataSheet, load_sheet
from interlace.forecast.profile.types import Lengths, Profile, RewardCosts, RolloutCosts, RunSizes, TrainCosts

BANDWIDTH_SHARE, FLOPS_SHARE, TRAIN_SHARE = 0.7, 0.5, 0.4
"""Shares of the data sheet that are reached: bandwidth and arithmetic in inference, arithmetic in training."""
LAUNCH_S = 2.5e-3
"""Seconds of a decode step for kernel launches and sampling."""
REDUCE_S = 1e-5
"""Seconds of an all-reduce between devices in a decode step; each layer has two."""
MEMORY_SHARE = 0.9
"""Share of a device's memory that an engine uses."""
TRAIN_BYTES = 16
"""Bytes of state per trained parameter: weights, gradient and moments in mixed precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Properties of a model that determine its costs."""

    name: str
    num_parameters: int
    num_layers: int
    num_kv_heads: int
    kv_bytes_per_token: int
    """KV cache of all layers in bf16, bytes per token."""
    logit_bytes_per_token: int
    """Float32 logits, bytes per token."""
    hidden_bytes_per_token: int
    """Hidden state in bf16, bytes per token."""
    expert_parameters: int = 0
    """Parameters of all routed experts, included in num_parameters."""
    num_experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0

    @property
    def active_parameters(self) -> int:
        """Parameters that compute a token."""
        return self.read_parameters(1)

    def read_parameters(self, num_tokens: int) -> int:
        """Returns the expected number of parameters that `num_tokens` tokens use together, if experts are equally
        likely.
        """
        if not self.num_experts:
            return self.num_parameters
        unused = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return round(self.num_parameters - unused * self.expert_parameters)


def roofline_profile(device: str, shape: ModelShape, sizes: RunSizes, *, micro_batch_tokens: int) -> Profile:
    """Returns the costs of a model on a kind of device, from its data sheet. Raises UserError for an unknown kind."""
    sheet, bf16_bytes = load_sheet(device), 2 * shape.num_parameters
    load_s = bf16_bytes / sheet.host_bytes_per_s
    state_bytes = TRAIN_BYTES * shape.num_parameters
    token_s = 8 * shape.active_parameters / (TRAIN_SHARE * sheet.flops)  # activations are computed twice
    return Profile(
        device=sheet.name,
        basis="roofline",
        kind=device,
        model=shape.name,
        sizes=sizes,
        source=f"data sheet: interlace/forecast/costs/devices/{device}.yaml",
        device_memory_bytes=sheet.memory_bytes,
        rollout=_estimate_rollout(sheet, shape, load_s),
        actor=TrainCosts(
            token_s=token_s,
            inference_token_s=token_s / 4,
            call_s=0.05,
            optimizer_s=3 * state_bytes / (BANDWIDTH_SHARE * sheet.bytes_per_s),
            export_s=2 * bf16_bytes / sheet.host_bytes_per_s,
            state_bytes=state_bytes,
            moment_bytes=state_bytes // 2,
            working_bytes=micro_batch_tokens
            * (2 * shape.logit_bytes_per_token + shape.num_layers * shape.hidden_bytes_per_token),
            onload_s=state_bytes / sheet.host_bytes_per_s,
            offload_s=state_bytes / sheet.host_bytes_per_s,
            efficiency=0.98,
        ),
        reward=RewardCosts(median_s=0.2, sigma=0.8, max_s=30, workers=256, solve_rate=0.5, solve_spread=0.4),
        lengths=Lengths(
            prompt_tokens=200, median=max(1.0, sizes.max_new_tokens / 8), prompt_sigma=0.6, response_sigma=0.6,
            cap_share=0.03,
        ),
    )  # fmt: skip


def _estimate_rollout(sheet: DataSheet, shape: ModelShape, load_s: float) -> RolloutCosts:
    bf16_bytes = 2 * shape.num_parameters
    byte_s = 1 / (BANDWIDTH_SHARE * sheet.bytes_per_s)
    weights_s = 2 * shape.active_parameters * byte_s  # of one sequence
    sequence_s = 2 * shape.active_parameters / (FLOPS_SHARE * sheet.flops)
    steps = tuple(
        (batch, LAUNCH_S + max(2 * shape.read_parameters(batch) * byte_s, batch * sequence_s))
        for batch in (1, 16, 64, 128, 256, 512)
    )
    cache_bytes = max(2**30, int(MEMORY_SHARE * sheet.memory_bytes) - bf16_bytes)
    alone_s = LAUNCH_S + weights_s
    scaling = tuple(
        (count, alone_s / (LAUNCH_S + weights_s / count + 2 * shape.num_layers * REDUCE_S)) for count in (2, 4, 8)
    )
    heads = [(count, float(count)) for count in (2, 4, 8) if count <= shape.num_kv_heads]
    return RolloutCosts(
        steps=steps,
        context_token_s=shape.kv_bytes_per_token / (BANDWIDTH_SHARE * sheet.bytes_per_s),
        prefill_token_s=sequence_s,
        kv_tokens=cache_bytes // shape.kv_bytes_per_token,
        kv_token_s=shape.kv_bytes_per_token / sheet.host_bytes_per_s,
        max_running=512,
        update_s=0.3,
        state_bytes=bf16_bytes,
        device_bytes=cache_bytes,
        onload_s=load_s,
        offload_s=load_s,
        scaling=scaling,
        context_scaling=tuple(heads),
    )
