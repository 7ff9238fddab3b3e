"""Recorded passes give what the pass itself gives; the recording itself needs a GPU."""

from copy import deepcopy
from functools import partial

import pytest
import torch

from tests.training.small import small_model
from unmask.models.backbone import Backbone, BackboneConfig
from unmask.models.packing import Layout, Spans
from unmask.training.compiled import Recorded, Replayed, compiled_networks


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
        tokens, attention_mask = rows(draw)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda), torch.set_grad_enabled(grad):
            found.append(trunk(tokens, Layout.of(tokens, attention_mask, torch.bfloat16)))
    return found


@pytest.mark.parametrize("grad", [False, True])
def test_on_a_cpu_nothing_is_recorded(grad):
    trunk, rows = trunk_and_rows("cpu")
    truth = outputs(trunk, rows, grad)
    trunk.run = Replayed(trunk.run)
    assert all(map(torch.equal, outputs(trunk, rows, grad), truth))
    assert not trunk.run.graphs


class Stubbed(Replayed):
    """Records on a CPU: the graph is the pass itself, on what lies where it would read."""

    MOST = 3

    def _on_gpu(self, x):
        return True

    def _record(self, x, cos, sin, attend):
        inputs = (*(self._room(*pair) for pair in (("x", x), ("cos", cos), ("sin", sin), ("ends", attend.ends))),)
        hidden = self._room("hidden", x)
        stub = type("Graph", (), {"replay": lambda this: hidden.copy_(self.run(*inputs[:3], Spans(inputs[3], 32)))})
        return Recorded(stub(), inputs, hidden)


def test_what_comes_again_is_recorded():
    """From the third pass of a shape on, up to MOST shapes, without gradients; every result is one's own."""
    trunk, rows = trunk_and_rows("cpu")
    truth = outputs(trunk, rows)
    trunk.run = Stubbed(trunk.run)
    assert all(map(torch.equal, outputs(trunk, rows, draws=2), truth))
    assert not trunk.run.graphs
    assert outputs(trunk, rows, grad=True, draws=4)[0].requires_grad
    assert not trunk.run.graphs, "gradients would be lost"
    assert all(map(torch.equal, outputs(trunk, rows), truth)), "none is overwritten by a later one"
    assert len(trunk.run.graphs) == 1
    first = trunk.run.rooms["x"]
    for number in (15, 9, 4):  # fewer sequences: other shapes
        fewer = [
            outputs(trunk, lambda draw, number=number: [part[:number] for part in rows(0)], draws=1) for _ in range(4)
        ]
        assert all(torch.equal(one, fewer[0][0]) for [one] in fewer), "the first two are not recorded"
        assert torch.allclose(fewer[0][0], truth[0][:number], atol=1e-5), "in another shape, products may round apart"
    assert len(trunk.run.graphs) == Stubbed.MOST
    assert trunk.run.rooms["x"] is first, "smaller ones share its memory"
    assert all(map(torch.equal, outputs(trunk, rows), truth))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_recorded_pass_is_the_pass(compiled):
    trunk, rows = trunk_and_rows("cuda")
    run = torch.compile(trunk.run, dynamic=True) if compiled else trunk.run
    trunk.run = run
    truth = outputs(trunk, rows)
    trunk.run = Replayed(run)
    first = outputs(trunk, rows)
    assert len(trunk.run.graphs) == 1, "all six have the same shape"
    assert all(map(torch.equal, first, truth)), "also those whose result was overwritten by a later replay"
    adamw = torch.optim.AdamW(trunk.parameters(), lr=0.1, fused=True)  # as in joint training, between a teacher's walks
    outputs(trunk, rows, grad=True)[0].float().square().sum().backward()
    adamw.step()
    again = outputs(trunk, rows)
    assert not torch.equal(again[5], truth[5]), "the weights have changed"
    trunk.run = run
    assert all(map(torch.equal, again, outputs(trunk, rows)))


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("replay", [False, True])
def test_what_is_compiled_and_for_how_long(deep, replay, monkeypatch):
    """A deep trunk block by block; the denoiser's passes alone are recorded; in the end the model is as it was."""
    monkeypatch.setattr("unmask.training.compiled.DEEP", 0 if deep else 1)
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function) or partial(function))
    model = small_model()
    trunk = model.denoiser.backbone
    chooser, plain = model.selector.run, {trunk.run, model.scorer.backbone.run, model.selector.run}
    blocks = {block.forward for block in (*trunk.blocks, *model.scorer.backbone.blocks)}
    with compiled_networks(model, replay):
        assert set(compiled) == (blocks | {chooser} if deep else plain)
        assert isinstance(trunk.run, Replayed) == replay
        assert not isinstance(model.scorer.backbone.run, Replayed), "it is trained"
    assert {trunk.run, model.scorer.backbone.run, model.selector.run} == plain
    assert {block.forward for block in (*trunk.blocks, *model.scorer.backbone.blocks)} == blocks


@pytest.mark.parametrize("deep", [False, True])
def test_a_copy_that_is_compiled_runs_its_own_weights(deep, monkeypatch):
    """Under FSDP it is a copy that is trained."""
    monkeypatch.setattr("unmask.training.compiled.DEEP", 0 if deep else 1)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda *given: function(*given))
    model = small_model()
    copy = deepcopy(model)
    with compiled_networks(copy), torch.no_grad():
        before = copy.denoiser(torch.zeros(1, 4, dtype=torch.long))
        copy.denoiser.backbone.blocks[0].down.weight.mul_(2.0)
        assert not torch.equal(copy.denoiser(torch.zeros(1, 4, dtype=torch.long)), before)
