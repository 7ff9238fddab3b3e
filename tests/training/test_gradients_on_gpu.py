"""What a GPU trains on, packed, compiled and in bfloat16, are the gradients of the CPU in float32."""

import copy

import pytest
import torch
from torch.nn.utils import get_total_norm

from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser
from unmask.tasks.task import Examples
from unmask.training.compiled import compiled_networks
from unmask.training.objectives import DenoiseObjective

L, N, V = 96, 24, 50  # positions, of which the last N are the response; tokens


def examples(rows):
    """Prompts of all lengths, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    place, starts = torch.arange(L), torch.randint(L - N, (rows, 1), generator=generator)
    tokens = torch.randint(V, (rows, L), generator=generator)
    return Examples(tokens, (place >= L - N).expand(rows, -1).clone(), place >= starts)


def gradients(denoiser, device, compile=False):
    rows = 64
    denoiser, ids = denoiser.to(device), torch.arange(rows)
    objective = DenoiseObjective(denoiser, seed=0, compile=compile)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        objective(examples(rows).to(device), ids, (ids + 0.5) / rows).loss.backward()
    return {name: weight.grad.cpu() for name, weight in denoiser.named_parameters()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("layers", [2, 26])  # the second is compiled block by block
@pytest.mark.parametrize("adapted", [False, True])
def test_gradients_on_a_gpu(adapted, layers, compile):
    """`adapted`: as a causal language model is, with a tied head, grouped queries, and shifted."""
    torch.manual_seed(0)
    shape = BackboneConfig(192, layers, 3, 512, max_length=L, kv_heads=int(adapted))
    denoiser = Denoiser(shape, V, tied_head=adapted, shift=adapted)
    expected = gradients(copy.deepcopy(denoiser), "cpu")
    on_gpu = denoiser.to("cuda")
    if compile:
        torch._dynamo.reset()
        with compiled_networks(on_gpu):
            found = gradients(on_gpu, "cuda", compile=True)
    else:
        found = gradients(on_gpu, "cuda")
    assert get_total_norm(found.values()) == pytest.approx(get_total_norm(expected.values()), rel=0.01)
    for name, gradient in expected.items():
        assert torch.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.995, name
