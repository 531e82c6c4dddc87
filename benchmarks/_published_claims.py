"""Published throughput ratios, each with its published setting and the assumptions made here.

They were written down before any comparison. Stated settings are taken from their sources. Missing settings are
assumed, and are the same for a claim and its baseline. Mixes of lengths are not published: those for verl and RLinf are
chosen so that the *baseline* alone behaves as published, the others are assumed.
"""

from dataclasses import dataclass, replace

from interlace.forecast.profile.types import Lengths

SPLITS = (25, 50, 62, 75)
"""Shares of the devices for generation, in percent. A split preset uses the best one if its paper states none."""
REASONING = Lengths(prompt_tokens=200, median=7000, prompt_sigma=0.5, response_sigma=0.5, cap_share=0.03)
"""A reasoning model: mean of about 9k of 28k tokens."""
SHORT_TAIL = Lengths(prompt_tokens=200, median=600, prompt_sigma=0.6, response_sigma=0.6, cap_share=0.025)
"""RollPacker's mix: three in four responses within 1k tokens, the longest at the limit."""
CHAT = Lengths(prompt_tokens=150, median=250, prompt_sigma=0.5, response_sigma=0.6, cap_share=0.01)
WITHIN, NEARLY, TOLERANCE = "within", "within 10 %", 0.1
H800, H20 = "qwen2.5-7b-h800", "qwen2.5-7b-h20"
STREAMED = ("schedule.granularity.actor=sample",)
"""Training takes every sample that has arrived: StreamRL's dynamic batches, and the finest of the granules among which
RLinf's scheduler chooses. The presets wait for an eighth of a step.
"""
RECOMPUTED = ("algorithm.off_policy.proximal=recomputed",)
"""Recomputes the log-probs of the policy at the start of a step."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Seconds of the stages of a colocated baseline's step, as its source publishes them. Costs are fitted to them."""

    generate: float
    train: float
    """Seconds of training; includes log-probs if these are not given."""
    log_probs: float = 0.0
    train_on: tuple[int, float] | None = None
    """(another number of devices, published seconds of the same training on them)."""
    generate_on: tuple[int, float] | None = None
    """The same for generation. If fewer devices are not slower, the longest response determines the time: a decode step
    is assumed to take the same time for any batch.
    """


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of a run."""

    devices: int
    prompts: int
    samples: int
    max_tokens: int
    lengths: Lengths
    profile: str = H800
    splits: tuple[int, ...] = SPLITS
    engine: int = 1
    """Devices per engine."""
    minibatches: int = 1
    settings: tuple[str, ...] = ()
    """Further overrides."""
    fit: Stages | None = None
    """Stages that the costs are fitted to before any comparison. If None, the costs are a roofline's."""
    fitted_on: "Setup | None" = None
    """Setup of the baseline whose fitted costs apply; None to fit to this setup."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published throughput ratio."""

    name: str
    preset: str
    baseline: str
    low: float
    high: float
    setup: Setup
    baseline_setup: Setup
    reason: str = ""
    """Explanation, if the simulated ratio is outside the published range."""
    before_training: bool = False
    """True if only generation and inference are compared."""
    by_steps: bool = False
    """True to compare steps with the same number of samples instead of trained tokens: responses may be shorter in one.
    """

    def distance(self, ratio: float) -> float:
        """Returns the distance of a ratio from the published range."""
        return max(self.low - ratio, ratio - self.high, 0.0)

    def holds(self, ratio: float) -> bool:
        """Returns whether a ratio is within the published range."""
        return self.distance(ratio) == 0.0

    def verdict(self, ratio: float) -> str:
        """Returns `within`, `within 10 %` of the range's nearer end, or `outside` with the reason."""
        if self.holds(ratio):
            return WITHIN
        near = self.low if ratio < self.low else self.high
        return NEARLY if abs(ratio / near - 1) <= TOLERANCE else f"outside; {self.reason}".rstrip("; ")


RANKER = 0.97
"""Rank correlation at which a ranker finds 87 % of the longest fifth, as StreamRL reports for its 7B model."""
STREAM = Setup(
    devices=32, prompts=128, samples=16, max_tokens=20480,
    lengths=REASONING.model_copy(update={"rank_correlation": RANKER}),
)  # fmt: skip
"""StreamRL (2504.15930): 7B on 32 devices, 20k tokens; batch and mix are assumed."""
AREAL = Setup(
    devices=128, prompts=512, samples=16, max_tokens=27648, lengths=REASONING, splits=(75,), minibatches=4,
    settings=RECOMPUTED,
)  # fmt: skip
"""AReaL (2505.24298): 512 prompts of 16, 27,648 tokens, four minibatches, decoupled PPO, 75 % generate; number of
devices and mix are assumed.
"""
VERL_MIX = Lengths(prompt_tokens=200, median=1250, prompt_sigma=0.6, response_sigma=0.6, cap_share=0.03)
"""Mix with which, and a roofline's costs, the colocated baseline takes the published 356 s per step of verl."""
VERL_COLOCATED = Setup(
    devices=128, prompts=512, samples=16, max_tokens=28672, lengths=VERL_MIX, profile=H20, engine=4, minibatches=16,
    settings=RECOMPUTED, fit=Stages(generate=177.85, log_probs=53.92, train=113.81, train_on=(64, 133.41),
                 generate_on=(64, 150.72)),
)  # fmt: skip
"""verl's page (docs/advance/fully_async.md): steps of 512 prompts in minibatches of 32, recomputed log-probs, engines
as in the asynchronous run (assumed). Its table contains the stages of this baseline on 128 devices and on 64.
"""
VERL = replace(VERL_COLOCATED, prompts=128, minibatches=4, settings=(), splits=(50,), fitted_on=VERL_COLOCATED)
"""The same page and its script for 64 and 64 devices: steps of four minibatches of 32 prompts, a version every four,
engines of four devices, log-probs of the engines.
"""
ONE_STEP_MIX = Lengths(prompt_tokens=200, median=380, prompt_sigma=0.6, response_sigma=0.6, cap_share=0.03)
"""Mix with which, and a roofline's costs, the colocated baseline takes the published 699 s per step of verl."""
ONE_STEP = Setup(
    devices=16, prompts=512, samples=16, max_tokens=8192, lengths=ONE_STEP_MIX, profile=H20, splits=(25,), engine=2,
    minibatches=16, settings=RECOMPUTED, fit=Stages(generate=207, log_probs=119, train=344, train_on=(12, 347)),
)  # fmt: skip
"""verl's one-step-off trainer (docs/advance/one_step_off.md and its Megatron scripts): 4 and 12 devices, 512 prompts of
16 in minibatches of 32, engines of two devices; both recompute log-probs. The stages are the baseline's, except
training on 12 devices, which comes from the compared run: the baseline has no row of it.
"""
RLINF_MIX = Lengths(prompt_tokens=200, median=5000, prompt_sigma=0.5, response_sigma=0.5, cap_share=0.03)
"""Mix with which generation on 40 of 64 devices takes 14 % longer than on all of them, as RLinf (2509.15965) reports.
"""
RLINF = Setup(devices=64, prompts=512, samples=8, max_tokens=28672, lengths=RLINF_MIX, splits=(62,))
FUSED = Setup(
    devices=64, prompts=512, samples=1, max_tokens=1024, lengths=CHAT,
    settings=("algorithm=ppo", "algorithm.kl_coefficient=0.01"),
)  # fmt: skip
"""RLHFuse (2409.13221): PPO with a reference, 512 samples; model, devices and mix are assumed."""


def packed(devices: int, max_tokens: int, generate_s: float) -> Setup:
    """Returns RollPacker's sizes (2509.21009): 128 prompts of 8 on H800. generate_s: generation of its baseline, 70 %
    of the step.
    """
    return Setup(
        devices=devices,
        prompts=128,
        samples=8,
        max_tokens=max_tokens,
        lengths=SHORT_TAIL,
        fit=Stages(generate=generate_s, train=generate_s * 0.3 / 0.7),
    )


def claim(name: str, preset: str, baseline: str, published: tuple[float, float], setup: Setup, **rest: object) -> Claim:
    """Makes a claim; the baseline's setup is the same unless given."""
    low, high = published
    fields = {"baseline_setup": setup, **rest}
    return Claim(name=name, preset=preset, baseline=baseline, low=low, high=high, setup=setup, **fields)  # type: ignore[arg-type]


CLAIMS = (
    claim("StreamRL, synchronous, against its own colocated", "streamrl-sync", "verl-colocated", (1.06, 1.41),
          replace(STREAM, settings=STREAMED), baseline_setup=STREAM,
          reason="0.97x with verl's mix of lengths"),
    claim("StreamRL, asynchronous, against verl", "streamrl-async", "verl-colocated", (1.41, 2.66), STREAM,
          reason="1.35x with verl's mix of lengths"),
    claim("RollPacker against verl, 8k tokens", "rollpacker", "verl-colocated", (1.30, 2.03), packed(16, 8192, 82),
          by_steps=True),
    claim("RollPacker against verl, 16k tokens", "rollpacker", "verl-colocated", (1.48, 2.22), packed(32, 16384, 277),
          by_steps=True, reason="reached at twice the median length"),
    claim("RollPacker against verl, 32k tokens", "rollpacker", "verl-colocated", (2.21, 2.56), packed(64, 32768, 673),
          by_steps=True, reason="reached at twice the median length"),
    claim("RLHFuse against its base, generation and inference", "rlhfuse", "rlhfuse", (1.2, 1.6), FUSED,
          baseline_setup=replace(FUSED, settings=(*FUSED.settings, "schedule.tail=none", "schedule.granularity=step")),
          before_training=True, reason="no assumed parameter alone brings it there"),
    claim("AReaL, staleness 4 against 0", "areal", "areal", (1.76, 2.77), AREAL,
          baseline_setup=replace(AREAL, settings=(*AREAL.settings, "schedule.max_staleness=0"))),
    claim("AReaL against a synchronous colocated system", "areal", "verl-colocated", (1.5, 2.8), AREAL,
          reason="reached at half the seconds a trained token"),
    claim("verl fully asynchronous (d), 128 H20", "verl-fully-async-d", "verl-colocated", (2.35, 2.67), VERL,
          baseline_setup=VERL_COLOCATED),
    claim("verl stream only (b), 128 H20", "verl-fully-async-b", "verl-colocated", (1.54, 1.95), VERL,
          baseline_setup=VERL_COLOCATED,
          reason="reached at a quarter of the share at the limit"),
    claim("verl one-step-off, 4 + 12 H20", "one-step-off", "verl-colocated", (1.23, 1.40), ONE_STEP,
          reason="reached at a quarter of the median length"),
    claim("RLinf disaggregated against collocated, 40 + 24", "rlinf-disaggregated", "rlinf-collocated", (1.17, 1.21),
          replace(RLINF, settings=STREAMED), baseline_setup=RLINF),
)  # fmt: skip
"""RollPacker's low end is its tail batching alone; its high end is the whole system, including rewards and planner.
AReaL's ends are from its Table 7, on 8 devices and on many. For verl's stream mode, step and total times are published;
the ends are the smallest and the largest of these ratios. RLHFuse's fused training needs a pipeline-parallel trainer,
which is not modelled, so only its published results for generation and inference are compared.
"""
