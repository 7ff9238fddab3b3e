"""The scheduler in the real pipeline of LLaDA2, with a small random model: it writes what `unmask.generate` writes."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import unmask
from tests import test_sglang
from tests.test_sglang import MASK, V
from unmask.errors import UserError
from unmask.models.order_model import load_selector

pytest.importorskip("diffusers", reason="pip install 'unmask[diffusers]'")

from diffusers import LLaDA2Pipeline

from unmask.diffusers import UnmaskScheduler

PROMPTS = torch.tensor([[3, 1, 4], [1, 5, 9]])
random_model = partial(test_sglang.random_model, budget=6, spread=1.0)


class Model(torch.nn.Module):
    """As LLaDA2's own class answers."""

    device = torch.device("cpu")

    def __init__(self, denoiser):
        super().__init__()
        self.denoiser, self.passes = denoiser, 0

    def forward(self, tokens, attention_mask, position_ids):
        self.passes += 1
        logits = self.denoiser(tokens, attention_mask.bool())
        return SimpleNamespace(logits=torch.nn.functional.pad(logits, (0, 1), value=9.0))  # its head has the mask


def write(model, scheduler, **options):
    pipeline = LLaDA2Pipeline(Model(model.denoiser), scheduler, None)
    pipeline.set_progress_bar_config(disable=True)
    settings = {"mask_token_id": MASK, "editing_threshold": None, "output_type": "seq", "minimal_topk": 1} | options
    return pipeline(input_ids=PROMPTS, **settings).sequences, pipeline.model.passes


@pytest.mark.parametrize(
    "policy",
    [
        "iid", "top-prob", "left-to-right", "stochastic(margin,0.5)", "threshold:0.6", "eb:0.5", "klass", "credit",
        "dus", "blocks(4,threshold:0.3)", "rdm", "p2", "remdm-cap", "joint-threshold(0.5,0.3)",
        "learned", "learned(price=2.0)", "lo-arm",
    ],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_block_is_what_generate_writes(policy, temperature, tmp_path):
    model = random_model()
    model.save_pretrained(tmp_path)
    scheduler = UnmaskScheduler(policy, run=str(tmp_path), block_length=12, seed=3)
    canvas = torch.nn.functional.pad(PROMPTS, (0, 9), value=MASK)
    rule = unmask.policies.parse_policy(policy, model.selector)
    expected = unmask.generate(model.denoiser, canvas, rule, 8, seed=3, temperature=temperature)
    found, passes = write(model, scheduler, gen_length=9, num_inference_steps=8, temperature=temperature)
    assert torch.equal(found, expected.tokens[:, 3:])
    assert passes == int(expected.num_steps.max())


def test_blocks_from_left_to_right():
    """Each as `generate` writes it behind what stands; with a generator, draws are its own and differ by block."""
    model, x = random_model(), torch.nn.functional.pad(PROMPTS, (0, 9), value=MASK)
    for end in (4, 8, 12):
        x[:, :end] = unmask.generate(model.denoiser, x[:, :end], "threshold:0.5", 3).tokens
    scheduler = UnmaskScheduler("threshold:0.5", block_length=4)
    assert torch.equal(write(model, scheduler, gen_length=9, num_inference_steps=3)[0], x[:, 3:])

    def draw(seed):
        even, logits = torch.zeros(2, 40, MASK), []
        scheduler.set_timesteps(1, block_length=40)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(2):
            masks = torch.full((2, 40), MASK)
            options = {"mask_token_id": MASK, "temperature": 1.0, "generator": generator}
            logits.append(scheduler.step(even, 0, masks, **options).prev_sample)
        return torch.stack(logits)

    assert torch.equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()
    for drawn in (draw(1), draw(None)):
        assert (drawn[0] != drawn[1]).any()
        assert (drawn[:, 0] != drawn[:, 1]).any()


def test_a_sequence_that_has_ended_stays_as_it_is():
    model, scheduler = random_model(), UnmaskScheduler("left-to-right", block_length=4)
    whole, _ = write(model, scheduler, gen_length=9, num_inference_steps=4)
    end = int(whole[0, 2])
    found, _ = write(model, scheduler, gen_length=9, num_inference_steps=4, eos_token_id=end)
    assert found[0, :3].tolist() == whole[0, :3].tolist()
    assert (found[0, 5:] == MASK).all()


def test_a_sequence_that_reveals_nothing_at_a_step_gets_its_own_logits_at_the_next():
    model, x = random_model(), torch.nn.functional.pad(PROMPTS, (0, 9), value=MASK)
    expected = unmask.generate(model.denoiser, x, "iid", 9, seed=1)
    first, second = (set(row) for row in expected.reveal_step[:, 3:].tolist())
    assert second - first  # steps at which the second reveals and the first does not
    scheduler = UnmaskScheduler("iid", block_length=12, seed=1)
    assert torch.equal(write(model, scheduler, gen_length=9, num_inference_steps=9)[0], expected.tokens[:, 3:])


def test_what_the_pipeline_left_out_is_written_at_the_next_step():
    scheduler, logits = UnmaskScheduler("left-to-right", block_length=4), torch.randn(2, 4, V)
    scheduler.set_timesteps(4, block_length=4)
    sample = scheduler.step(logits, 0, torch.full((2, 4), MASK), mask_token_id=MASK).prev_sample
    assert (sample != MASK).sum(-1).tolist() == [1, 1]
    sample[0, 0] = MASK
    sample = scheduler.step(logits, 1, sample, mask_token_id=MASK).prev_sample
    assert (sample != MASK).tolist() == [[True, False, False, False], [True, True, False, False]]


def test_the_configuration_is_kept(tmp_path):
    random_model().save_pretrained(tmp_path / "run")
    UnmaskScheduler("learned(price=2)", run=str(tmp_path / "run"), seed=5).save_pretrained(tmp_path / "scheduler")
    again = UnmaskScheduler.from_pretrained(tmp_path / "scheduler")
    assert (again.policy.name, again.config.seed) == ("learned(price=2)", 5)
    assert torch.equal(again.network.out.weight, load_selector(tmp_path / "run").out.weight)


def test_what_cannot_be_driven_is_one_line(tmp_path):
    random_model("hidden").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"train with model\.selector\.reads = 'logits'"):
        UnmaskScheduler("learned", run=str(tmp_path))
    with pytest.raises(UserError, match="learned needs a learned order"):
        UnmaskScheduler("learned")
    with pytest.raises(UserError, match="wino asks for passes of its own: give another rule"):
        UnmaskScheduler("wino")
    with pytest.raises(UserError, match="give mask_token_id"):
        UnmaskScheduler().step(torch.zeros(1, 2, 3), 0, torch.zeros(1, 2).long())
