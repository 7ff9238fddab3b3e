"""The engine against the plain loop of benchmarks/decode.py: the same tokens."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "benchmarks" / "decode.py"
spec = importlib.util.spec_from_file_location("decode_benchmark", SOURCE)
decode = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(decode)

CASE = decode.Case(32, 2, 2, 64, 50, 16, 8, 37, 8, torch.float64, "cpu", 1, {})  # 37 is no multiple of 8
MODELS = {dtype: decode.build(CASE, dtype) for dtype in (torch.float32, torch.float64)}
RULES = {name: place for place, name in enumerate(decode.RULES)}


class Blurred:
    """A denoiser whose hidden states are off by about `size`: what rounding does, made as large as one likes."""

    def __init__(self, denoiser, size):
        self.denoiser, self.size = denoiser, size
        self.mask_token_id = denoiser.mask_token_id

    def hidden(self, tokens, attention_mask=None):
        states = self.denoiser.hidden(tokens, attention_mask)
        noise = torch.randn(states.shape[-1], dtype=states.dtype, generator=torch.Generator().manual_seed(0))
        return states + self.size * noise

    def logits(self, states):
        return self.denoiser.logits(states)


def differences(rule, dtype, blur=0.0):
    denoiser, selector, prompts = MODELS[dtype]
    policy = decode.policies(selector)[RULES[rule]]
    return decode.differences(denoiser, policy, CASE.steps, prompts, Blurred(denoiser, blur))


@pytest.mark.parametrize("rule", RULES)
def test_identical_in_float64(rule):
    assert differences(rule, torch.float64) == []


@pytest.mark.parametrize("rule", RULES)
def test_in_float32_they_part_only_where_two_scores_all_but_tie(rule):
    assert all(difference.gap <= 1e-5 for difference in differences(rule, torch.float32))


@pytest.mark.parametrize("rule", RULES)
def test_every_difference_starts_where_the_scores_are_as_close_as_the_blur(rule):
    """Small blurs move few sequences, all near ties; large ones must be seen, or the two tests above say nothing."""
    few, many = (differences(rule, torch.float64, blur) for blur in (1e-5, 1e-1))
    assert len(many) > 5
    assert len(few) < len(many)
    assert all(difference.gap < 1e-3 for difference in few)
    assert max(difference.gap for difference in many) > 1e-3
