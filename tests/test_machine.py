"""bfloat16 is computed in where it is worth it, and what is measured for that leaves the process as it was."""

import pytest
import torch

from unmask import runtime as machine
from unmask.runtime import matrix_speed, precision_on


@pytest.fixture
def speed(monkeypatch):
    """Set how fast this CPU is in bfloat16, float32 being 1."""

    def set_to(of_bf16):
        precision_on.cache_clear()
        monkeypatch.setattr(
            machine, "matrix_speed", lambda dtype=torch.float32, **_: 1 + (of_bf16 - 1) * (dtype == torch.bfloat16)
        )

    yield set_to
    precision_on.cache_clear()


def test_a_cpu_that_bf16_slows_down_computes_in_float32(speed):
    speed(0.01)
    assert precision_on("cpu", "bf16") == "no"
    assert precision_on("cpu", "no") == "no"
    assert precision_on("cuda", "bf16") == "bf16"
    for busy in (2.0, 0.5, 0.2):
        speed(busy)
        assert precision_on("cpu", "bf16") == "bf16", "a busy machine may halve what is measured"
        assert precision_on("cpu", "no") == "no"


def test_the_measurement_changes_nothing():
    precision_on.cache_clear()
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    assert precision_on("cpu", "bf16") in ("bf16", "no")
    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == before
    assert matrix_speed(size=64) > 0


def test_memory_that_torch_keeps_on_a_gpu_is_available(monkeypatch):
    """Freed tensors stay with torch: 10 are free, and 3 of the 7 that it holds are in use."""
    for name, found in (("mem_get_info", (10, 24)), ("memory_reserved", 7), ("memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert machine.available_memory(torch.device("cuda")) == 14
