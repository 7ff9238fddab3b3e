"""`unmask` in a child process that is sent a signal at a given moment of its work.

With SIGKILL nothing of Python's runs any more: no handler, no `finally`, no buffer that is flushed.
"""

import importlib
import os
import signal
import sys
import time

HANGS = 1800  # seconds after which a child is given up: half a minute of work on a machine under any load

# Functions that a run calls often: between updates, and before each of the steps of writing what must last.
MOMENTS = {
    "update": "unmask.training.loop:backward",
    "metrics": "unmask.training.metrics:Metrics.write",
    "tensors": "unmask.training.checkpoint:save_file",
    "fingerprint": "unmask.files:fingerprint",
    "sync": "unmask.files:sync",
    "rename": "pathlib:Path.rename",
    "prune": "unmask.files:discard",
    "remove": "pathlib:Path.unlink",
    "manifest": "unmask.files:write_manifest",
    "stage": "unmask.training.run:save_stage",
    "model": "unmask.models.order_model:save_file",
    "finish": "unmask.training.run:finish",
    "sweep": "unmask.training.run_folder:sweep",
}


def call_at(where, count, action):
    """Let `action` happen as the call number `count` of a moment begins."""
    module_name, _, path = MOMENTS[where].partition(":")
    owner = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), [0]

    def counted(*arguments, **options):
        calls[0] += 1
        if calls[0] == count:
            action()
        return original(*arguments, **options)

    setattr(owner, name, counted)


def run_killed(arguments, where="", count=0, number=signal.SIGKILL, log=os.devnull):
    """The exit code of `unmask ARGUMENTS` in a child, or minus the signal that ended it; its stderr goes to `log`."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115
            if where:
                call_at(where, count, lambda: os.kill(os.getpid(), number))
            from unmask.cli import main

            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code or 0
        finally:
            os._exit(code)  # never back into the tests of the parent
    deadline = time.monotonic() + HANGS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    raise AssertionError(f"unmask {' '.join(map(str, arguments))} hangs")
