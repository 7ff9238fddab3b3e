"""A pass over few tokens as one CUDA graph."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

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
    everywhere = torch.nn.modules.module.register_module_forward_hook
    for listen in (denoiser.backbone.blocks[1].register_forward_hook, everywhere):
        listening = listen(lambda *given: None)
        assert not recordable(denoiser)  # replayed, it would tell its listeners nothing
        listening.remove()
    assert recordable(denoiser)
    own, prompts = denoiser.hidden, torch.full((2, 3), 50)
    truth = generate(denoiser, prompts, "margin", 2).tokens
    denoiser.hidden = lambda tokens, attention_mask=None: own(tokens, attention_mask)  # and knows no `finish`
    assert not recordable(denoiser)
    assert torch.equal(generate(denoiser, prompts, "margin", 2).tokens, truth)
    del denoiser.hidden

    class Quantised(torch.nn.Parameter):
        """Computes by kernels of its own, and has no address."""

    denoiser.head.weight = Quantised(denoiser.head.weight.data)
    assert not recordable(denoiser)


class Doubles(torch.nn.Module):
    """Hidden states [b, L, 1] that are w x the tokens."""

    def __init__(self):
        super().__init__()
        self.w, self.passes = torch.nn.Parameter(torch.tensor(2.0)), 0

    def hidden(self, tokens, attention_mask):
        self.passes += 1
        return self.w.detach() * tokens[..., None]


def test_on_the_cpu_every_pass_is_made():
    denoiser, tokens = Doubles(), torch.arange(6).view(2, 3)
    trunk = Recorded(denoiser, denoiser.hidden)
    for _ in range(5):
        assert (trunk(tokens, None) == 2 * tokens[..., None]).all()
    assert denoiser.passes == 5


@pytest.fixture
def fake_gpu(monkeypatch):
    """What happened, tokens that say that they are on a GPU, a denoiser, and its trunk before it records."""
    events = []

    class Graph:
        def capture_begin(self, capture_error_mode):
            events.append("begin")

        def capture_end(self):
            events.append("end")

        def replay(self):
            events.append("replay")

    class OnGPU(torch.Tensor):
        is_cuda = True

    @contextmanager
    def device_of(tokens):
        events.append("its device")
        yield
        events.append("the device before")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    denoiser, tokens = Doubles(), torch.arange(6).view(2, 3).as_subclass(OnGPU)
    trunk = Recorded(denoiser, denoiser.hidden)
    for _ in range(2):  # the next pass is recorded
        trunk(tokens, None)
    return events, tokens, denoiser, trunk


RECORDING = ["its device", "begin", "end", "the device before"]


def test_a_graph_is_recorded_on_the_device_of_the_tokens_and_again_when_a_weight_moves(fake_gpu):
    events, tokens, denoiser, trunk = fake_gpu
    assert events == []
    for _ in range(2):
        trunk(tokens, None)
    assert events == [*RECORDING, "replay", "replay"]
    denoiser.w.data.fill_(3.0)  # where it is: a replay reads it there
    trunk(tokens, None)
    assert denoiser.passes == 3
    denoiser.w.data = torch.tensor(4.0)  # as `to` and `half` do: a replay would read what is freed
    assert [int(trunk(tokens, None)[1, 2, 0]) for _ in range(2)] == [20, 20]
    trunk(tokens, None)
    assert events[-5:] == [*RECORDING, "replay"]


def test_what_fails_while_it_is_recorded_is_not_replayed(fake_gpu):
    events, tokens, denoiser, trunk = fake_gpu
    denoiser.w = None  # as out of memory
    for _ in range(2):
        with pytest.raises(AttributeError):
            trunk(tokens, None)
    assert events == 2 * ["its device", "begin", "end"]


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
