"""Array inputs have the same embeddings in the rollout engine and the train engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from interlace.core.errors import UserError
from interlace.core.training import UpdateConfig
from interlace.core.types import NO_GROUP, Prompt, Request, Response, Sample, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train import TrainEngine, sft_loss
from interlace.engines.train.config import ActorConfig, OptimizerConfig, TrainConfig
from interlace.models.config import RobotShape
from interlace.robots.models.vla import build_tiny_vla
from interlace.rollouts.base import Outcome
from interlace.rollouts.session import read_turn
from interlace.rollouts.turns import turn_columns

SHAPE = RobotShape(state_size=6, action_size=3, chunk=2, bins=32)
NUM = 12


def policy(decoding: str = "parallel"):
    model, tokenizer = build_tiny_vla(SHAPE.model_copy(update={"decoding": decoding}), seed=3)
    return model.eval(), tokenizer


def request(model, tokenizer, index: int, *, state=None) -> Request:
    rng = np.random.default_rng(index)
    words = "reach the goal" if index % 2 else "open the drawer with the handle"
    ids = [*tokenizer(words)["input_ids"], *[model.config.placeholder_token_id] * 4]
    state = rng.normal(size=(1, 6)).astype(np.float32) if state is None else state
    return Request(
        uid="robot", owner=SampleKey(NO_GROUP, index), prompt_ids=ids, inputs={"state": state},
        query_ids=tuple(model.config.query_token_ids or ()), params=SamplingParams(max_new_tokens=6),
    )  # fmt: skip


def serve(engine: NativeEngine, requests) -> dict[int, Response]:
    for one in requests:
        engine.submit(one)
    done = {}
    while len(done) < len(requests):
        done |= {one.request.owner.index: one for one in engine.step().finished}
    return done


def trainer(decoding: str, *, padded: bool = False) -> TrainEngine:
    model, _ = policy(decoding)
    if padded:
        model._can_set_attn_implementation = lambda: False
    config = TrainConfig(
        actor=ActorConfig(), update=UpdateConfig(), tokens_per_microbatch=64, temperature=1.0, served_dtype="float32"
    )
    return TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(lr=1e-3), config=config)


def sample_of(completion: Response, prompt_ids) -> Sample:
    prompt = Prompt(uid="robot", token_ids=np.asarray(prompt_ids, np.int32), text="", answer="")
    turn = read_turn(0, completion, None, ())
    columns = turn_columns(prompt, [turn, replace(turn, number=1)], Outcome(), {}, ())
    return Sample(key=SampleKey(0, completion.request.owner.index), prompt=prompt, segments=columns["segments"])


ENGINES = {
    "compiled": NativeConfig(max_running=16, max_tokens=2048, max_batch_tokens=40),
    "model": NativeConfig(max_running=16, max_tokens=2048, compile_decoder=False),
    "drafts": NativeConfig(max_running=16, max_tokens=2048, draft_below=16),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("decoding", ["parallel", "tokens"])
def test_training_recomputes_what_was_sampled(decoding, engine, padded):
    model, tokenizer = policy(decoding)
    requests = [request(model, tokenizer, index) for index in range(NUM)]
    done = serve(NativeEngine(model, config=ENGINES[engine]), requests)
    samples = []
    for one in requests:
        completion = done[one.owner.index]
        assert len(completion.token_ids) == 6 and max(completion.token_ids) < SHAPE.bins
        samples.append(sample_of(completion, one.prompt_ids[:-4]))
    train = trainer(decoding, padded=padded)
    assert train.packed.is_packed is not padded
    for sample, found in zip(samples, train.logprobs(samples), strict=True):
        mask = sample.loss_mask
        np.testing.assert_allclose(found[mask], sample.logprobs[mask], atol=1e-5)
        assert sample.num_sampled == 12


@pytest.mark.parametrize("decoding", ["parallel", "tokens"])
def test_bits_do_not_depend_on_what_else_runs(decoding):
    model, tokenizer = policy(decoding)
    engine = NativeEngine(model, config=NativeConfig(max_running=64, max_tokens=4096))
    together = serve(engine, [request(model, tokenizer, index) for index in range(40)])
    for index in (0, 7, 39):
        alone = serve(engine, [request(model, tokenizer, index)])[index]
        assert alone.token_ids == together[index].token_ids
        assert alone.logprobs == together[index].logprobs


def test_what_is_sensed_matters_and_is_not_shared_as_a_prefix():
    model, tokenizer = policy()
    engine = NativeEngine(model, config=NativeConfig(max_running=8, max_tokens=1024))
    first = request(model, tokenizer, 0)
    other = replace(first, owner=SampleKey(NO_GROUP, 1), inputs={"state": np.full((1, 6), 3.0, np.float32)})
    done = serve(engine, [first, other])
    assert done[0].logprobs != done[1].logprobs


def test_tokens_drawn_at_once_see_no_other_drawn_token():
    """Parallel decoding is what one forward of the model over prompt and queries gives."""
    model, tokenizer = policy()
    one = request(model, tokenizer, 1)
    tokens = torch.tensor([[*one.prompt_ids, *one.query_ids]])
    places = torch.nonzero(tokens[0] == model.config.placeholder_token_id)[:, 0]
    with torch.no_grad():
        logits = model(tokens, inputs={"state": torch.from_numpy(one.inputs["state"])}, input_places=places).logits
    expected = logits[0, -6:].log_softmax(-1)
    done = serve(NativeEngine(model), [one])[1]
    found = expected[torch.arange(6), torch.tensor(done.token_ids)]
    np.testing.assert_allclose(done.logprobs, found.numpy(), atol=1e-5)


def test_new_weights_embed_anew():
    model, tokenizer = policy()
    engine = NativeEngine(model)
    before = serve(engine, [request(model, tokenizer, 0)])[0]
    changed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed["model.projector.state.2.weight"] += 0.5
    engine.update_weights(changed, 1, "keep")
    after = serve(engine, [request(model, tokenizer, 0)])[0]
    assert before.logprobs != after.logprobs and set(after.versions) == {1}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (np.zeros((1, 5), np.float32), "the model reads"),
        (np.full((1, 6), np.nan, np.float32), "not finite"),
        (np.zeros((2, 6), np.float32), "placeholder"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(state, words):
    model, tokenizer = policy()
    with pytest.raises(UserError, match=words):
        NativeEngine(model).submit(request(model, tokenizer, 0, state=state))


def test_a_text_model_refuses_arrays():
    from interlace.models.tiny import build_tiny

    model, _ = build_tiny("micro", 0)
    one = Request(
        uid="x", owner=SampleKey(NO_GROUP, 0), prompt_ids=[5, 6], inputs={"state": np.zeros((1, 6), np.float32)},
        params=SamplingParams(max_new_tokens=2),
    )  # fmt: skip
    with pytest.raises(UserError, match="tokens alone"):
        NativeEngine(model.eval()).submit(one)
