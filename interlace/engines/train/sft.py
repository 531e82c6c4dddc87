"""Supervised fine-tuning as one more loss of the train engine."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from interlace.core.training import LossFn, LossInputs, LossOutputs
from interlace.core.types import BoolArray, IntArray, Prompt, Sample, SampleKey, Segment


def sft_loss(inputs: LossInputs) -> LossOutputs:
    """Computes the negative log-likelihood of the answer tokens. The temperature of the engine should be 1."""
    return LossOutputs(loss_T=-inputs.logprobs_T, metrics_T={})


def scale_loss(loss: LossFn, factor: float) -> LossFn:
    """Returns the loss multiplied by a factor; its metrics stay unchanged."""

    def compute(inputs: LossInputs) -> LossOutputs:
        outputs = loss(inputs)
        return replace(outputs, loss_T=outputs.loss_T * factor)

    return compute


def make_supervised_sample(
    prompt_ids: Sequence[int] | IntArray, answer_ids: Sequence[int] | IntArray, imitated: BoolArray | None = None
) -> Sample:
    """Makes a trainable sample of a prompt/answer pair. It has no behaviour log-probs, since no policy sampled it.

    imitated: [L] False on tokens of the answer that are not trained; None trains all.
    """
    answer = np.asarray(answer_ids, np.int32)
    prompt = Prompt(uid="supervised", token_ids=np.asarray(prompt_ids, np.int32), text="", answer="")
    segments = (Segment(token_ids=answer, sampled=imitated),)
    return Sample(key=SampleKey(0, 0), prompt=prompt, segments=segments, advantages=np.ones(len(answer), np.float32))


def preference_sample(
    prompt_ids: Sequence[int] | IntArray,
    chosen_ids: Sequence[int] | IntArray,
    rejected_ids: Sequence[int] | IntArray,
    compared: tuple[BoolArray | None, BoolArray | None] = (None, None),
) -> Sample:
    """Makes a sample to accumulate of a pair: two branches below one prompt, marked by the sign of the advantages.

    compared: [L] of each completion, False on tokens that the model only reads, such as messages of the user; None
    compares all.
    """
    chosen, rejected = np.asarray(chosen_ids, np.int32), np.asarray(rejected_ids, np.int32)
    prompt = Prompt(uid="pair", token_ids=np.asarray(prompt_ids, np.int32), text="", answer="")
    signs = np.concatenate([np.ones(len(chosen), np.float32), -np.ones(len(rejected), np.float32)])
    segments = (
        Segment(token_ids=chosen, sampled=compared[0]),
        Segment(token_ids=rejected, sampled=compared[1]),
    )
    return Sample(key=SampleKey(0, 0), prompt=prompt, segments=segments, advantages=signs)
