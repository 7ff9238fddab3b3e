"""`unmask train` in a process that is killed at a given moment: python -m tests.training.killed WHERE COUNT ARGUMENTS...

WHERE names a function that a run calls often; the process sends itself SIGKILL as the call number COUNT begins, so
nothing of Python's runs any more: no handler, no `finally`, no buffer that is flushed.
"""

import importlib
import os
import signal
import sys

# The moments: between updates, and before each of the steps of writing a checkpoint or a finished stage.
MOMENTS = {
    "update": "unmask.training.loop:_backward",
    "metrics": "unmask.training.metrics:Metrics.write",
    "tensors": "unmask.training.checkpoints:save_file",
    "fingerprint": "unmask.training.checkpoints:_fingerprint",
    "sync": "unmask.training.checkpoints:sync",
    "rename": "pathlib:Path.rename",
    "prune": "shutil:rmtree",
    "stage": "unmask.training.run:save_stage",
    "finish": "unmask.training.run:finish",
}


def kill_at(where: str, count: int, number: int = signal.SIGKILL) -> None:
    """Send this process a signal as the call number `count` of a moment begins."""
    module_name, _, path = MOMENTS[where].partition(":")
    owner = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), [0]

    def counted(*arguments, **options):
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), number)
        return original(*arguments, **options)

    setattr(owner, name, counted)


if __name__ == "__main__":
    from unmask.cli import main

    kill_at(sys.argv[1], int(sys.argv[2]))
    main(sys.argv[3:])
