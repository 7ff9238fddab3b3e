import re

import pytest
import torch

from tests.decoding.small import MASK, Recorded, small_denoiser, small_selector
from unmask.decoding.generate import generate
from unmask.decoding.policies import IID, Learned, TopProbability

DENOISER = small_denoiser()
PROMPTS = torch.tensor([[1, 2, MASK, MASK], [3, MASK, 4, MASK]])


def refused(message, *arguments, denoiser=DENOISER, **options):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        generate(denoiser, *arguments, **options)
    assert "\n" not in str(caught.value)


def test_an_empty_response_is_named():
    full = torch.tensor([1, 2, 3, 4])
    refused("prompt 1 has an empty response", torch.stack([PROMPTS[0], full, PROMPTS[1]]), IID(), 3)
    refused("prompt 2 has an empty response", [PROMPTS[0], PROMPTS[1], full[:2]], IID(), 3)
    refused("prompt 1 has an empty response", [PROMPTS[0], full[:0]], IID(), 3)


def test_masks_on_padding_are_no_response():
    attention = torch.tensor([[True, True, True, True], [True, False, True, False]])
    refused("prompt 1 has an empty response", PROMPTS, IID(), 3, attention=attention)


def test_no_prompts():
    refused("the list of prompts is empty", [], IID(), 3)
    refused("got shape [0, 4]", PROMPTS[:0], IID(), 3)
    refused("got shape [4]", PROMPTS[0], IID(), 3)


def test_a_list_is_padded_by_generate_itself():
    refused("leave attention out", list(PROMPTS), IID(), 3, attention=torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("max_steps", [0, -1])
def test_no_steps(max_steps):
    refused(f"max_steps must be at least 1, got {max_steps}", PROMPTS, IID(), max_steps)


@pytest.mark.parametrize("temperature", [-0.5, float("nan"), float("inf")])
def test_no_temperature(temperature):
    refused(
        f"temperature must not be negative and must be finite, got {temperature}",
        PROMPTS,
        IID(),
        3,
        temperature=temperature,
    )


@pytest.mark.parametrize("ids", [torch.tensor([1]), torch.tensor([1, 2, 3]), torch.tensor([[1, 2], [3, 4]])])
def test_ids_that_do_not_fit_the_prompts(ids):
    refused(f"each of the 2 prompts once, got shape {list(ids.shape)}", PROMPTS, IID(), 3, ids=ids)


@pytest.mark.parametrize("shape", [(1, 4), (2, 3), (2, 4, 1)])
def test_attention_that_does_not_fit_the_prompts(shape):
    attention = torch.ones(shape, dtype=torch.bool)
    refused(f"attention has shape {list(shape)}, the prompts have [2, 4]", PROMPTS, IID(), 3, attention=attention)


def test_a_budget_that_the_selector_was_not_trained_for():
    policy = Learned(small_selector((2, 5)))
    refused("trained for T = 2, 5 only, not for 3 steps", PROMPTS, policy, 3)
    for max_steps in (2, 5):
        generate(DENOISER, PROMPTS, policy, max_steps)


class Breaks(Recorded):
    """NaN or infinity in the logits of sequences that begin with token 9, once fewer than three masks are left."""

    value = torch.nan

    def hidden(self, tokens, attention=None):
        hidden = super().hidden(tokens, attention)
        broken = (tokens[:, 0] == 9) & ((tokens == MASK).sum(-1) < 3)
        return torch.where(broken[:, None, None], torch.nan, hidden)

    def logits(self, hidden):
        logits = super().logits(hidden)
        return torch.where(logits.isnan(), self.value, logits)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_name_the_sequence_and_the_step(value):
    """Four masks, one a step: two are left at step 2.  Sequence 0 is finished by then, so rows are not sequences."""
    prompts = torch.tensor([[1, 1, 1, 1, MASK], [2, MASK, MASK, MASK, MASK], [9, MASK, MASK, MASK, MASK]])
    denoiser = Breaks(DENOISER)
    denoiser.value = value
    refused("logits are not finite for sequence 2 at step 2", prompts, TopProbability(), 4, denoiser=denoiser)
    generate(denoiser, prompts[:2], TopProbability(), 4)


def test_a_sequence_longer_than_the_context():
    refused("longer than the model's context of 64", torch.full((1, 65), MASK), IID(), 3)
