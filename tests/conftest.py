import os

# Small tensors: a second thread only waits for the first, and on a busy machine much longer than that.  oneDNN has its
# own count, read when torch is loaded, and a child forked beside a second thread of OpenMP waits for it forever.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from unmask.process_settings import process_settings

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_settings_for_every_test():
    """A product in bfloat16 can change what torch does for the rest of the process."""
    with process_settings():
        yield
