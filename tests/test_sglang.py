"""The step of SGLang's algorithm, with a stand-in for SGLang itself."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import unmask
from unmask.errors import UserError
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer

V = MASK = 12


class StandIn:
    def __init__(self, config):
        self.block_size, self.mask_id = config.block_size, config.mask_id


def random_model(reads="logits", budget=4, spread=2.0, drawn=0):
    torch.manual_seed(0)
    selector = SelectorConfig(8, 1, 2, budget=budget, prices=(0.1, 3.0), spread=spread, reads=reads, drawn=drawn)
    config = OrderModelConfig(V, BackboneConfig(16, 2, 2, 32, max_length=32), selector=selector)
    model = OrderModel(config, word_level_tokenizer([str(token) for token in range(V)])).eval()
    for parameter in model.denoiser.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return model


@pytest.fixture
def algorithm(tmp_path, monkeypatch):
    base = ModuleType("sglang.srt.dllm.algorithm.base")
    base.DllmAlgorithm = StandIn
    for name in ("sglang", "sglang.srt", "sglang.srt.dllm", "sglang.srt.dllm.algorithm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "unmask.sglang", raising=False)
    from unmask.sglang import Algorithm

    def make(model, **given):
        model.save_pretrained(tmp_path / "run")
        config = {"run": tmp_path / "run", **given}
        return Algorithm(SimpleNamespace(block_size=12, mask_id=MASK, algorithm_config=config))

    return make


@pytest.mark.parametrize("price", [0.1, 3.0])
def test_a_block_is_what_generate_writes(algorithm, price):
    model = random_model()
    step = algorithm(model, price=price)
    canvas = torch.nn.functional.pad(torch.tensor([[3, 1, 4], [1, 5, 9]]), (0, 9), value=MASK)
    rule = unmask.policies.Learned(model.selector, price=price, deterministic=True)
    expected = unmask.generate(model.denoiser, canvas, rule, 4)
    batch, states, taken = SimpleNamespace(input_ids=canvas.flatten(), dllm_prompt_mask=None), [None, None], []
    for _ in range(step.max_steps(12)):
        tokens = batch.input_ids.view(2, 12)
        logits = torch.nn.functional.pad(model.denoiser(tokens), (0, 1), value=9.0)  # its head has the mask
        taken.append(step.step(batch, logits.flatten(0, 1), states))
        if all(taken[-1]):
            break
    assert torch.equal(batch.input_ids.view(2, 12), expected.tokens)
    assert [column.index(True) for column in zip(*taken, strict=True)] == expected.num_steps.tolist()
    assert expected.num_steps.max() > 1


def test_a_given_mask_token_stays(algorithm):
    step, tokens = algorithm(random_model()), torch.full((12,), MASK)
    batch = SimpleNamespace(input_ids=tokens, dllm_prompt_mask=torch.arange(12)[None] < 3)
    for states in ([3], [4]):
        done = step.step(batch, torch.zeros(12, V + 1), states)
    assert (tokens == MASK).tolist() == [True] * 3 + [False] * 9
    assert done == [True]
    with pytest.raises(UserError, match="SGLang gives logits alone"):
        algorithm(random_model("hidden"))
    with pytest.raises(UserError, match="SGLang writes greedily"):
        algorithm(random_model(drawn=V + 1))
