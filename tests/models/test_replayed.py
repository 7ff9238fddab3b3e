"""Recorded passes give what the pass itself gives; the recording itself needs a GPU."""

import pytest
import torch

from tests.training.small import small_model
from unmask.models.backbone import Backbone, BackboneConfig, Layout
from unmask.models.replayed import Replayed
from unmask.training.run import compile_networks


def trunk_and_rows(device):
    """A trunk, and rows with another padding each time that they are asked for."""
    torch.manual_seed(0)
    trunk = Backbone(BackboneConfig(64, 2, 2, 128, max_length=32), 20).to(device)

    def rows(draw):
        generator = torch.Generator().manual_seed(draw)
        lengths = torch.randperm(16, generator=generator)[:, None] + 4  # as many tokens whatever the draw
        tokens = torch.randint(20, (16, 32), generator=generator)
        return tokens.to(device), (torch.arange(32) < lengths).to(device)

    return trunk, rows


def outputs(trunk, rows, grad=False, draws=6):
    found = []
    for draw in range(draws):
        tokens, attention = rows(draw)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda), torch.set_grad_enabled(grad):
            found.append(trunk(tokens, Layout.of(tokens, attention, torch.bfloat16)))
    return found


@pytest.mark.parametrize("grad", [False, True])
def test_on_a_cpu_nothing_is_recorded(grad):
    trunk, rows = trunk_and_rows("cpu")
    truth = outputs(trunk, rows, grad)
    trunk.run = Replayed(trunk.run)
    assert all(map(torch.equal, outputs(trunk, rows, grad), truth))
    assert not trunk.run.graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_pass_is_the_pass():
    trunk, rows = trunk_and_rows("cuda")
    run, truth = trunk.run, outputs(trunk, rows)
    trunk.run = Replayed(run)
    first = outputs(trunk, rows)
    assert len(trunk.run.graphs) == 1, "all six have the same shape"
    assert all(map(torch.equal, first, truth)), "also those whose result was overwritten by a later replay"
    with torch.no_grad():
        trunk.blocks[0].down.weight.mul_(3.0)
    again = outputs(trunk, rows)
    assert not torch.equal(again[5], truth[5]), "the weights have changed"
    trunk.run = run
    assert all(map(torch.equal, again, outputs(trunk, rows)))


@pytest.mark.parametrize(("deep", "stay"), [(False, True), (True, True), (False, False)])
def test_what_is_compiled_and_recorded(deep, stay, monkeypatch):
    """A deep trunk block by block; nothing is recorded where the weights move.  Compilation itself waits for a call."""
    monkeypatch.setattr("unmask.training.run.DEEP", 0 if deep else 1)
    model = small_model()
    trunk, plain = model.denoiser.backbone, model.denoiser.backbone.run
    compile_networks(model, stay)
    assert all((block._compiled_call_impl is not None) == deep for block in trunk.blocks)
    assert isinstance(trunk.run, Replayed) == stay
    run = trunk.run.run if stay else trunk.run
    assert (run == plain) == deep
    assert not isinstance(model.scorer.backbone.run, Replayed), "it is trained"
