"""Faults injected into a training run: does it recover to the same bits, and how many updates are repeated?

    python benchmarks/resilience.py              # the faults, a few minutes on two slow cores
    python benchmarks/resilience.py --cost       # what checkpoints cost the recipe gsm8k-30m

A fault is recovered if the run, resumed with the same command, ends with the weights and metrics of an undisturbed run,
bit for bit.  Updates lost are those that were repeated; a checkpoint is written every 5 updates.
Bars: every fault recovered, nothing lost beyond the last checkpoint, and with 60 s between checkpoints under 3% of the
time spent on them.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from unmask import files
from unmask.jsonl import unsealed
from unmask.training import checkpoint as checkpoints
from unmask.training import loop, metrics
from unmask.training.checkpoint import CheckpointFolder
from unmask.training.run_folder import is_finished

RECIPE = """
threads = 1
[task]
name = "groups"
groups = 2
group_size = 2
symbols = 3
[model]
width = 16
layers = 1
heads = 2
intermediate = 16
absolute_positions = true
[model.selector]
width = 8
heads = 2
[model.scorer]
width = 8
layers = 1
heads = 2
[denoise]
updates = 12
batch = 8
warmup = 1
ema = 0.7
[order]
budget = 2
trajectories = 2
batch = 4
updates = 12
warmup = 1
denoiser_rate = 1e-3
baseline = "moving-average"
[saving]
every_updates = 5
"""
EVERY, UPDATES = 5, 36
Action = Callable[[], None]


def child(place: Path, before: Action = lambda: None, log: str = "log") -> int:
    """The exit code of `unmask train` in a child process, or minus the signal; `before` may plant a fault there."""
    number = os.fork()
    if number == 0:
        code = 70
        try:
            sys.stdout, sys.stderr = open(os.devnull, "w"), open(place / log, "w")  # noqa: SIM115
            count_updates(place / "updates")
            before()
            from unmask.cli import main

            main(["train", str(place / "recipe.toml"), "--out", str(place / "run"), "--cpu"])
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def count_updates(path: Path) -> None:
    """Add a byte to a file at every update: it survives the process."""
    original = loop.backward

    def counted(*arguments):  # type: ignore[no-untyped-def]
        with path.open("ab") as file:
            file.write(b".")
        return original(*arguments)

    loop.backward = counted


def at_call(owner: object, name: str, count: int, action: Action) -> Action:
    """A fault: as the call number `count` of a function begins, `action` happens."""

    def plant() -> None:
        original, calls = getattr(owner, name), [0]

        def counted(*arguments, **options):  # type: ignore[no-untyped-def]
            calls[0] += 1
            if calls[0] == count:
                action()
            return original(*arguments, **options)

        setattr(owner, name, counted)

    return plant


def die(number: int = signal.SIGKILL) -> Action:
    return lambda: os.kill(os.getpid(), number)


def fail(code: int) -> Action:
    def action() -> None:
        raise OSError(code, os.strerror(code))

    return action


def killed(place: Path, draw: random.Random) -> None:
    assert child(place, at_call(loop, "backward", draw.randint(1, UPDATES), die())) == -signal.SIGKILL


def killed_in_a_checkpoint(place: Path, draw: random.Random) -> None:
    owner, name, most = draw.choice(
        [(checkpoints, "save_file", 6), (files, "fingerprint", 12), (files, "sync", 20), (files, "write_manifest", 6)]
    )
    assert child(place, at_call(owner, name, draw.randint(1, most), die())) == -signal.SIGKILL


def terminated(place: Path, draw: random.Random) -> None:
    assert child(place, at_call(loop, "backward", draw.randint(1, UPDATES), die(signal.SIGTERM))) == 75
    assert "the same command" in (place / "log").read_text()


def damaged(how: Callable[[bytearray, random.Random], bytes]) -> Callable[[Path, random.Random], None]:
    def fault(place: Path, draw: random.Random) -> None:
        assert child(place, at_call(loop, "backward", draw.choice([11, 12, 23, 24, 35, 36]), die())) == -signal.SIGKILL
        newest = max((place / "run" / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        path = newest / draw.choice(["tensors.safetensors", "facts.json"])
        path.write_bytes(how(bytearray(path.read_bytes()), draw))

    return fault


def flip(data: bytearray, draw: random.Random) -> bytes:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return data


def refused_write(place: Path, draw: random.Random) -> None:
    """No file may grow beyond a few kilobytes: the write itself fails, deep in the library, as on a full disk."""

    def plant() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        at_call(
            loop, "backward", draw.randint(1, 34), lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        )()

    assert child(place, plant) == 2
    assert "could not be written" in (place / "log").read_text(), (place / "log").read_text()


def no_space(code: int) -> Callable[[Path, random.Random], None]:
    def fault(place: Path, draw: random.Random) -> None:
        owner, name = draw.choice([(checkpoints, "save_file"), (files, "sync")])
        assert child(place, at_call(owner, name, draw.randint(1, 6), fail(code))) == 2
        assert os.strerror(code) in (place / "log").read_text()

    return fault


def vanished(place: Path, draw: random.Random) -> None:
    """The folder goes away, as a network drive does, and comes back."""
    away = place / "away"
    move = at_call(loop, "backward", draw.randint(1, 34), lambda: os.rename(place / "run", away))
    assert child(place, move) == 2
    assert "could not be written" in (place / "log").read_text(), (place / "log").read_text()
    assert not (place / "run").exists()
    away.rename(place / "run")


def second_process(place: Path, draw: random.Random) -> None:
    """While a run is under way, another process tries to train into its folder."""

    def try_it() -> None:
        assert child(place, log="second") == 2

    assert child(place, at_call(loop, "backward", draw.randint(2, UPDATES), try_it)) == 0
    assert "another process is training" in (place / "second").read_text()


def cut_metrics(place: Path, draw: random.Random) -> None:
    assert child(place, at_call(metrics.Metrics, "write", draw.randint(2, 6), die())) == -signal.SIGKILL
    with (place / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "order", "upda')


FAULTS: dict[str, Callable[[Path, random.Random], None]] = {
    "SIGKILL between updates": killed,
    "SIGKILL inside a checkpoint": killed_in_a_checkpoint,
    "SIGTERM": terminated,
    "checkpoint truncated": damaged(lambda data, draw: data[: draw.randrange(len(data))]),
    "checkpoint with a flipped bit": damaged(flip),
    "disk full (a write fails)": refused_write,
    "disk full (no space left)": no_space(errno.ENOSPC),
    "read-only file system": no_space(errno.EROFS),
    "folder vanishes": vanished,
    "a second process": second_process,
    "metrics cut off": cut_metrics,
}


def outcome(run: Path) -> tuple[list[bytes], list[dict[str, object]]]:
    """The weights and the metrics, without the time that they took."""
    lines = [unsealed(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = [(run / part / "model.safetensors").read_bytes() for part in (".", "denoiser", "baseline")]
    return weights, [{**line, "seconds": 0} for line in lines]


def try_faults(times: int) -> bool:
    good = True
    with tempfile.TemporaryDirectory(prefix="unmask-resilience-") as folder:
        root = Path(folder)
        alone = new_place(root / "alone")
        assert child(alone) == 0, (alone / "log").read_text()
        print(f"{'fault':<32} {'tried':>6} {'recovered':>10} {'most updates lost':>18}")
        for name, fault in FAULTS.items():
            recovered, most_lost = 0, 0
            for attempt in range(times):
                place = new_place(root / "place")
                fault(place, random.Random(f"{name} {attempt}"))
                code = 0 if is_finished(place / "run") else child(place)
                recovered += code == 0 and outcome(place / "run") == outcome(alone / "run")
                most_lost = max(most_lost, len((place / "updates").read_bytes()) - UPDATES)
                shutil.rmtree(place)
            allowed = 2 * EVERY if name.startswith("checkpoint") else EVERY  # the one before a damaged one
            good &= recovered == times and most_lost <= allowed
            print(f"{name:<32} {times:>6} {recovered:>10} {most_lost:>18}", flush=True)
    return good


def new_place(place: Path) -> Path:
    place.mkdir()
    (place / "recipe.toml").write_text(RECIPE)
    (place / "updates").touch()
    return place


def cost(folder: Path) -> bool:
    """Seconds that a checkpoint of the recipe gsm8k-30m takes, with moments and averages, and its share of a minute."""
    from unmask.models.backbone import BackboneConfig
    from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer
    from unmask.recipe import load_recipe
    from unmask.training.state import StageState

    recipe = load_recipe("gsm8k-30m")
    assert recipe.denoise is not None
    device, words = "cuda" if torch.cuda.is_available() else "cpu", recipe.task["vocab_size"]
    given = recipe.model
    shape = BackboneConfig(given.width, given.layers, given.heads, given.intermediate, max_length=256)
    config = OrderModelConfig(words, shape)
    model = OrderModel(config, word_level_tokenizer([str(i) for i in range(words)])).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = StageState(model, optimizer, recipe.denoise)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert state.average is not None
    state.average.update()
    seconds = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store = CheckpointFolder(Path(place) / "checkpoints")
        for update in range(9):
            started = time.perf_counter()
            store.save("denoise", update, state.tensors(), state.facts())
            seconds.append(time.perf_counter() - started)
        size_mb = sum(path.stat().st_size for path in (store.folder / "denoise-00000008").iterdir()) / 1e6
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    middle = sorted(seconds)[len(seconds) // 2]
    share = middle / (60 + middle)
    print(
        f"gsm8k-30m on {device}: {parameters:.1f}M parameters, {size_mb:.0f} MB per checkpoint: {middle:.2f} s (median "
        f"of {len(seconds)}, most {max(seconds):.2f}); one per minute costs {100 * share:.2f}% of the time (bar 3%)"
    )
    return share < 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="how often each fault is tried")
    parser.add_argument("--cost", action="store_true", help="measure what checkpoints cost instead")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where --cost writes its checkpoints")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not (cost(options.folder) if options.cost else try_faults(options.times)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
