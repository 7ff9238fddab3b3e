"""A pass over few tokens as one CUDA graph."""

from __future__ import annotations

import pytest
import torch

from unmask import generate
from unmask.decoding import recorded
from unmask.decoding.recorded import Recorded, recordable
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser


def small_denoiser(shift: bool = False) -> Denoiser:
    torch.manual_seed(0)
    return Denoiser(BackboneConfig(32, 2, 2, 64), 50, shift=shift).double().eval()


def test_only_a_denoiser_that_says_so_is_recorded():
    class Derived(Denoiser):
        """May do anything in its passes."""

    denoiser = small_denoiser()
    assert recordable(denoiser)
    assert not recordable(Derived(BackboneConfig(32, 2, 2, 64), 50))
    assert not recordable(object())
    listening = denoiser.backbone.blocks[1].register_forward_hook(lambda *given: None)
    assert not recordable(denoiser)  # replayed, it would tell its listeners nothing
    listening.remove()
    assert recordable(denoiser)


def test_on_the_cpu_every_pass_is_made():
    passes = []

    def hidden(tokens, attention_mask):
        passes.append(tokens)
        return tokens[..., None].double()

    trunk, tokens = Recorded(hidden), torch.arange(6).view(2, 3)
    for _ in range(5):
        assert (trunk(tokens, None) == tokens[..., None]).all()
    assert len(passes) == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("options", [{}, {"guidance": 1.5}, {"temperature": 1.0}], ids=str)
def test_replayed_passes_give_the_same_tokens(shift, options, monkeypatch):
    denoiser = small_denoiser(shift).cuda()
    prompts = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(1)).cuda()
    prompts[:, 8:] = denoiser.mask_token_id
    prompts[1, 16:], prompts[2, 10:] = 7, 9  # 16, 8 and 2 masks: rows leave, and the shape changes on the way
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    out = generate(denoiser, prompts, "top-prob", 12, seed=3, **options)
    count, guided = len(replays), "guidance" in options  # then every step has two passes
    assert count == (18 if guided else 6)  # from the third pass with two rows on, and with one
    monkeypatch.setattr(recorded, "FEW", 0)
    plain = generate(denoiser, prompts, "top-prob", 12, seed=3, **options)
    assert len(replays) == count
    assert (out.tokens == plain.tokens).all()
    assert (out.reveal_step == plain.reveal_step).all()
