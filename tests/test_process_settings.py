"""What runs in a process does not depend on what ran there before."""

import pytest
import torch
from torch.nn.functional import linear

from tests.evaluation.test_evaluate import run, small_model
from tests.training.small import TINY_RECIPE
from unmask.decoding.policies import TopProbability
from unmask.evaluation.evaluate import HalfTrunk
from unmask.recipe import load_recipe
from unmask.runtime import process_settings
from unmask.training import run as run_module
from unmask.training.run import train


def settings():
    return torch.get_num_threads(), torch.backends.mkldnn.enabled


@pytest.fixture
def product():
    """Large enough for torch to want oneDNN."""
    left, right = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    return lambda dtype: linear(left.to(dtype), right.to(dtype))


def spoiled(function):
    """The same function, which then leaves torch as bfloat16 leaves it on some CPUs, and with other threads."""

    def call(*arguments, **options):
        found = function(*arguments, **options)
        torch.backends.mkldnn.enabled = False
        torch.set_num_threads(3)
        return found

    return call


def test_all_is_as_before():
    @process_settings(threads=1)
    def interrupted():
        assert settings() == (1, enabled)
        torch.backends.mkldnn.enabled = not enabled
        raise KeyboardInterrupt

    torch.set_num_threads(2)
    for enabled in (True, False):
        torch.backends.mkldnn.enabled = enabled
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert settings() == (2, enabled)
        with process_settings():
            assert settings() == (2, enabled)


def test_a_product_in_bf16_changes_nothing_midway_and_nothing_afterwards(product, recwarn):
    before = product(torch.float32)
    with process_settings(bf16=True):
        first, at_first = product(torch.float32), settings()
        product(torch.bfloat16)
        assert settings() == at_first
        assert torch.equal(product(torch.float32), first)
    assert torch.equal(product(torch.float32), before)
    assert not recwarn.list, "torch warns with a C++ stack where it gives up oneDNN"


def test_training_leaves_no_settings_behind(tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    torch.set_num_threads(2)
    before, stage, seen = settings(), run_module.run_stage, []
    monkeypatch.setattr(run_module, "run_stage", lambda *a, **b: seen.append(settings()) or spoiled(stage)(*a, **b))
    train(load_recipe(tmp_path / "tiny.toml"), tmp_path / "run", cpu=True)
    assert seen[0] == (1, before[1])
    assert settings() == before


def test_evaluation_leaves_no_settings_behind(monkeypatch):
    before = settings()
    monkeypatch.setattr(HalfTrunk, "hidden", spoiled(HalfTrunk.hidden))
    run(small_model(longest=4).float(), TopProbability(), 2, precision="bf16")
    assert settings() == before
