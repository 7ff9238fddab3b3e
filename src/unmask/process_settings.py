"""What torch keeps for a whole process, set for one piece of work."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def process_settings(*, threads: int = 0, bf16: bool = False) -> Iterator[None]:
    """`threads` CPU threads (0: as many as before) and oneDNN as bfloat16 leaves it; afterwards all is as before.

    On an ARM CPU without bfloat16, the first large product in it makes torch give up oneDNN: in every precision, and
    for the rest of the process.  Whatever ran later would differ in its last bits from the same in a new process.
    """
    threads_before, onednn_before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    try:
        if threads:
            torch.set_num_threads(threads)
        if bf16:
            _meet_bf16()
        yield
    finally:
        if torch.get_num_threads() != threads_before:
            torch.set_num_threads(threads_before)
        torch.backends.mkldnn.enabled = onednn_before


def _meet_bf16() -> None:
    """Let torch give up oneDNN now if it will: midway, a run that is resumed would be without it from another place."""
    square = torch.ones(64, 64, dtype=torch.bfloat16, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.functional.linear(square, square)
