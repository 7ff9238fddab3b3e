"""What a command runs on: processes and their device, torch's settings, what the machine is good at."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")

_STAYS_ON_CPU: ContextVar[bool] = ContextVar("stays_on_cpu", default=False)


class Processes:
    """Who shares the work, and how what they found comes together.  Accelerate is imported where there are many."""

    def __init__(self, cpu: bool = False) -> None:
        self.index, self.count = 0, 1
        _STAYS_ON_CPU.set(cpu)
        self.device = chosen_device()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            state = PartialState(cpu=self.device.type == "cpu")  # else, without a GPU, it would know of no others
            self.index, self.count, self.device = state.process_index, state.num_processes, state.device

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def share(self, ids: torch.Tensor) -> torch.Tensor:
        """The part of `ids` that this process works on: neighbours stay together."""
        return ids.tensor_split(self.count)[self.index]

    def gather(self, item: Item) -> list[Item]:
        """The item of every process, in their order, on all of them."""
        if self.count == 1:
            return [item]
        from accelerate.utils import gather_object

        return list(gather_object([item]))


def chosen_device() -> torch.device:
    """A GPU where there is one, unless the command was told to stay on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and not _STAYS_ON_CPU.get() else "cpu")


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
        if bf16:  # let torch give up oneDNN now if it will: midway, a resumed run would lose it at another place
            square = torch.ones(64, 64, dtype=torch.bfloat16, device="cpu")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.nn.functional.linear(square, square)
        yield
    finally:
        if torch.get_num_threads() != threads_before:
            torch.set_num_threads(threads_before)
        torch.backends.mkldnn.enabled = onednn_before


def matrix_speed(dtype: torch.dtype = torch.float32, size: int = 768, tries: int = 3) -> float:
    """Operations a second of a product of two square matrices on the CPU: the best of some tries."""
    matrix = torch.ones(size, size, dtype=dtype, device="cpu")

    def seconds() -> float:
        started = time.perf_counter()
        matrix @ matrix
        return time.perf_counter() - started

    return 2.0 * size**3 / min(seconds() for _ in range(tries))


def available_memory(device: torch.device | None = None) -> int:
    """Bytes that a process may still take: what the kernel calls available, where it says so, else all there are.

    device: a GPU, whose own memory is meant, with what torch keeps of it for tensors to come.
    """
    if device is not None and device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    with suppress(OSError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        if kilobytes := re.search(r"^MemAvailable:\s+(\d+) kB$", text, flags=re.MULTILINE):
            return int(kilobytes[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(what: str, needed: int, device: torch.device | None = None) -> None:
    """MemoryError where so many bytes are not available; `what` begins its message, such as "the weights take"."""
    if needed > (available := available_memory(device)):
        unit, name = (1e9, "GB") if needed >= 1e9 else (1e6, "MB")
        raise MemoryError(
            f"{what} at least {needed / unit:,.1f} {name} of memory, of which {available / unit:,.1f} {name} are "
            "available: take a smaller model, or free some memory"
        )


@cache
def precision_on(device: str, wanted: str) -> str:
    """`wanted`, "bf16" or "no"; but "no" on a CPU that bfloat16 slows down, hundredfold where its hardware lacks it.

    Whatever else runs there must not change the answer, or a run that resumes goes on in another precision: CPUs are
    about as fast in bfloat16, or a hundred times slower, and the limit lies far from both.
    """
    if device != "cpu" or wanted != "bf16":
        return wanted
    with process_settings(bf16=True):
        rounded = matrix_speed(torch.bfloat16, size=128, tries=10)
    return "bf16" if 10 * rounded > matrix_speed(size=128, tries=10) else "no"
