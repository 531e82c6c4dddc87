"""Seconds of published training runs against rooflines: absolute errors, of fitted and of held-out rows.

    python benchmarks/absolute.py [--write] [--json FILE]

The rows are NeMo-RL's performance tables (docs/about/performance-summary.md of its releases 0.5 and 0.6, with layouts
and mean lengths). A step is predicted from the shape of the model and the data sheet of the device: generation until
the longest response ends, log-probs of the trained policy, training under the row's layout
(interlace/forecast/costs/layouts.py), and the rest of a step. Fitted rows determine five numbers; no other row is used.
Runs that are off-policy generate and train at the same time, on the published parts of the devices.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from _page import write_table

from interlace.forecast.costs.layouts import TrainLayout, forecast_layout
from interlace.forecast.costs.roofline import BANDWIDTH_SHARE, FLOPS_SHARE, LAUNCH_S, REDUCE_S, ModelShape
from interlace.forecast.costs.sheets import DataSheet, load_sheet


def shape(
    name: str,
    billions: float,
    layers: int,
    heads: int,
    kv: int,
    hidden: int,
    experts: tuple[float, int, int] = (0.0, 0, 0),
) -> ModelShape:
    """Returns a model's shape. kv: bytes per token in bf16. experts: billions of parameters, number, per token."""
    return ModelShape(
        name=name,
        num_parameters=round(billions * 1e9),
        num_layers=layers,
        num_kv_heads=heads,
        kv_bytes_per_token=kv,
        logit_bytes_per_token=4 * 151_936,
        hidden_bytes_per_token=2 * hidden,
        expert_parameters=round(experts[0] * 1e9),
        num_experts=experts[1],
        experts_per_token=experts[2],
    )


LLAMA_8B = shape("Llama-3.1-8B", 8.03, 32, 8, 2 * 32 * 8 * 128 * 2, 4096)
QWEN_30B = shape("Qwen3-30B-A3B", 30.5, 48, 4, 2 * 48 * 4 * 128 * 2, 2048, experts=(29.0, 128, 8))
QWEN_235B = shape("Qwen3-235B-A22B", 235.0, 94, 4, 2 * 94 * 4 * 128 * 2, 4096, experts=(227.0, 128, 8))
DEEPSEEK = shape("DeepSeek-V3", 671.0, 61, 128, 61 * 576 * 2, 7168, experts=(653.0, 256, 8))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run."""

    model: ModelShape
    device: str
    devices: int
    generating: int
    """Devices that generate; as many as `devices` on-policy, which then take turns."""
    samples: int
    mean_tokens: int
    """Mean length of a sequence, prompt included."""
    longest: int
    engine: int
    """Devices per engine."""
    layout: tuple[int, int, int, int]
    """Tensor, context, expert, pipeline parallelism of training."""
    minibatches: int
    step_s: float
    """Published seconds of a step."""
    steps_off: int = 0
    """Steps by which samples may be older than the trained weights."""
    fitted: bool = False

    @property
    def off_policy(self) -> bool:
        """True if other devices train while these generate."""
        return self.generating < self.devices

    @property
    def name(self) -> str:
        """Text of the table."""
        how = f"{self.steps_off} off, {self.generating} generate" if self.off_policy else "on-policy"
        return f"{self.model.name}, {self.devices} {self.device.upper()}, {how}"


def row(
    model: ModelShape,
    devices: tuple[int, int],
    lengths: tuple[int, int],
    engine: int,
    layout: tuple[int, int, int, int],
    step_s: float,
    **rest: object,
) -> Row:
    """Makes a row. devices: all, and those that generate. lengths: mean and longest sequence."""
    fields = {"device": "h100", "samples": 512, "minibatches": 1, **rest}
    return Row(
        model=model, devices=devices[0], generating=devices[1], mean_tokens=lengths[0], longest=lengths[1],
        engine=engine, layout=layout, step_s=step_s, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


MOST_RUNNING = 256
"""Sequences that an engine runs together, at most: assumed."""
MANY = {"samples": 2048, "minibatches": 4}
ROWS = (
    row(QWEN_30B, (32, 32), (3203, 4096), 2, (1, 1, 8, 1), 192, **MANY, fitted=True),
    row(QWEN_235B, (128, 128), (5698, 8192), 16, (2, 2, 16, 8), 395, fitted=True),
    row(DEEPSEEK, (256, 256), (701, 1536), 32, (1, 1, 16, 16), 134, fitted=True),
    row(LLAMA_8B, (16, 16), (1019, 4096), 1, (1, 1, 1, 2), 92.8, **MANY, fitted=True),
    row(QWEN_30B, (32, 16), (3201, 4096), 2, (1, 1, 8, 2), 152, samples=2048, steps_off=1),
    row(QWEN_30B, (192, 64), (3206, 4096), 2, (1, 1, 8, 1), 34.5, **MANY, steps_off=8),
    row(QWEN_235B, (256, 256), (5713, 8192), 16, (2, 2, 16, 8), 312),
    row(QWEN_235B, (256, 128), (5721, 8192), 8, (4, 1, 16, 8), 231, steps_off=1),
    row(DEEPSEEK, (512, 512), (697, 1536), 32, (1, 1, 16, 16), 111),
    row(DEEPSEEK, (512, 256), (710, 1536), 32, (1, 1, 16, 16), 64.1, steps_off=1, fitted=True),
    row(LLAMA_8B, (16, 8), (1123, 4096), 1, (1, 1, 1, 1), 64.8, **MANY, steps_off=1),
    row(QWEN_30B, (16, 16), (3199, 4096), 1, (1, 1, 16, 1), 221, device="b200", **MANY),
    row(QWEN_235B, (64, 64), (5709, 8192), 8, (2, 2, 16, 4), 286, device="b200"),
    row(DEEPSEEK, (128, 128), (711, 1536), 32, (1, 1, 16, 8), 108, device="b200"),
)
"""Releases 0.6, and 0.5 for Llama. Devices that generate off-policy: examples/configs/recipes/llm/performance. GB200
rows use the data sheet of the B200, whose link to the host is slower.
"""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Numbers that no data sheet states."""

    train_share: float
    """Share of the arithmetic of the data sheet that training and log-probs reach."""
    decode: float
    """Seconds of a decode step, relative to the roofline."""
    step_s: float
    """Seconds of a step outside generation and training."""
    switch_s: float
    """Seconds per billion parameters in which devices that take turns change roles and engines get the weights."""
    move_s: float
    """Seconds per billion parameters in which engines on other devices get the weights."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Predicted seconds of a step by part."""

    generate: float
    train: float
    rest: float
    step_s: float


def predict(run: Row, fit: Fit) -> Parts:
    """Predicts a run."""
    sheet = load_sheet(run.device)
    training = run.devices - run.generating if run.off_policy else run.devices
    tensor, context, expert, pipeline = run.layout
    layout = TrainLayout(
        num_devices=training, tensor=tensor, context=context, expert=expert, pipeline=pipeline,
        tokens_per_microbatch=run.mean_tokens, reshards=False,
    )  # fmt: skip
    tokens = run.samples * run.mean_tokens
    one = forecast_layout(layout, run.model, sheet, tokens // run.minibatches, flops_share=fit.train_share)
    log_probs = run.minibatches * one.parts["compute"] / 4
    train = run.minibatches * one.step_s + log_probs
    generate = fit.decode * generate_s(run, sheet)
    rest = fit.step_s + (fit.move_s if run.off_policy else fit.switch_s) * run.model.num_parameters / 1e9
    step_s = (max(generate, train) if run.off_policy else generate + train) + rest
    return Parts(generate=generate, train=train, rest=rest, step_s=step_s)


def generate_s(run: Row, sheet: DataSheet) -> float:
    """Returns the seconds of generation of a step.

    On-policy, the longest sequence ends it, and sequences end evenly between none and the longest. Off-policy, engines
    stay full with as many sequences as the steps off-policy allow.
    """
    model, engines = run.model, run.generating // run.engine
    full = min(MOST_RUNNING, run.samples * max(1, run.steps_off) / engines)
    running = full if run.off_policy else run.samples / engines * min(1.0, run.mean_tokens / run.longest)
    byte_s = 1 / (BANDWIDTH_SHARE * sheet.bytes_per_s * run.engine)
    read_s = 2 * model.read_parameters(math.ceil(running)) * byte_s
    compute_s = running * 2 * model.active_parameters / (FLOPS_SHARE * sheet.flops * run.engine)
    cached_s = running * run.mean_tokens / 2 * model.kv_bytes_per_token * byte_s
    reduce_s = 2 * model.num_layers * REDUCE_S * (run.engine > 1)
    step_s = LAUNCH_S + max(read_s, compute_s) + cached_s + reduce_s
    steps = run.samples * run.mean_tokens / engines / running if run.off_policy else run.longest
    return steps * step_s


def fit_rows(rows: Sequence[Row]) -> Fit:
    """Returns the numbers with the least squared logarithmic error over some rows, on a grid."""

    def grid() -> Iterator[Fit]:
        for train, decode, step, switch, move in product(
            (0.05, 0.07, 0.1, 0.13, 0.17, 0.22, 0.28, 0.35, 0.4),
            (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0),
            (0.0, 3.0, 6.0, 10.0, 15.0),
            (0.0, 0.02, 0.04, 0.07, 0.1, 0.13),
            (0.0, 0.01, 0.02, 0.04, 0.06, 0.08),
        ):
            yield Fit(train_share=train, decode=decode, step_s=step, switch_s=switch, move_s=move)

    return min(grid(), key=lambda fit: sum(math.log(predict(each, fit).step_s / each.step_s) ** 2 for each in rows))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/planner.md")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    fit = fit_rows([each for each in ROWS if each.fitted])
    heads = ("run", "published s", "predicted s", "error", "roofline alone s")
    plain = Fit(train_share=0.4, decode=1.0, step_s=0.0, switch_s=0.0, move_s=0.0)
    lines, figures = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"], []
    for each in sorted(ROWS, key=lambda run: not run.fitted):
        parts, alone = predict(each, fit), predict(each, plain)
        error = parts.step_s / each.step_s - 1
        if not each.fitted:
            cells = [each.name, f"{each.step_s:g}", f"{parts.step_s:.0f}", f"{error:+.0%}", f"{alone.step_s:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
        figures.append({"run": each.name, "fitted": each.fitted, "published_s": each.step_s, "step_s": parts.step_s,
                        "error": error, "roofline_s": alone.step_s})  # fmt: skip
    for kind in (True, False):
        errors = sorted(abs(float(row["error"])) for row in figures if row["fitted"] is kind)  # type: ignore[arg-type]
        lines += ["", f"{'Fitted' if kind else 'Held-out'} rows: median error {median(errors):.0%}, largest "
                      f"{errors[-1]:.0%}, of {len(errors)}."]  # fmt: skip
    print("\n".join(lines))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if given.write:
        write_table(Path(__file__).parent.parent / "docs" / "planner.md", "absolute", "\n".join(lines))


if __name__ == "__main__":
    main()
