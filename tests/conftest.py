import pytest
import torch

from unmask.process_settings import process_settings

# Small tensors: a second thread only waits for the first, and on a busy machine much longer than that.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_settings_for_every_test():
    """A product in bfloat16 can change what torch does for the rest of the process."""
    with process_settings():
        yield
