"""What this machine is good at, measured."""

from __future__ import annotations

import os
import re
import time
from functools import cache
from pathlib import Path

import torch

from unmask.process_settings import process_settings


def matrix_speed(dtype: torch.dtype = torch.float32, size: int = 768) -> float:
    """Operations a second of a product of two square matrices on the CPU: the best of three."""
    matrix = torch.ones(size, size, dtype=dtype, device="cpu")
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def available_memory() -> int:
    """Bytes that a process may still take: what the kernel calls available, where it says so, else all there are."""
    try:
        kilobytes = re.search(
            r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    except OSError:
        kilobytes = None
    return int(kilobytes[1]) * 1024 if kilobytes else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def precision_on(device: str, wanted: str) -> str:
    """`wanted`, "bf16" or "no"; but "no" on a CPU that bfloat16 slows down, hundredfold where its hardware lacks it."""
    if device != "cpu" or wanted != "bf16":
        return wanted
    with process_settings(bf16=True):
        rounded = matrix_speed(torch.bfloat16, size=128)
    return "bf16" if 2 * rounded > matrix_speed(size=128) else "no"
