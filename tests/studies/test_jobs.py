"""Processes at once: who waits for whom, how many there are, and what happens when one fails or all must stop."""

import signal
import sys

import pytest

from unmask.errors import Stopped
from unmask.studies import jobs
from unmask.studies.jobs import Job, JobError, run_jobs

# What a training does with SIGTERM.
SAVES = (
    "import os, signal, sys, time;"
    "signal.signal(signal.SIGTERM, lambda *a: (print('saved', flush=True), sys.exit(75)));"
    "print('ready, apart:', os.getpgrp() == os.getpid(), flush=True); time.sleep(1800)"
)


class Seen:
    """What ran when, as the parent sees it."""

    def __init__(self):
        self.events, self.running, self.most = [], 0, 0

    def began(self, job):
        self.events.append(f"+{job.name}")
        self.running += 1
        self.most = max(self.most, self.running)

    def ended(self, job, code, started, seconds):
        self.events.append(f"-{job.name} {code}")
        self.running -= 1
        assert seconds > 0
        assert started > 1e9


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(jobs, "PAUSE", 0.01)


def job(folder, name, code="", after=()):
    return Job(name, [sys.executable, "-S", "-c", code], frozenset(after), folder / "logs" / f"{name}.txt")


def until(path):
    """Code that ends when a file is there, or, after half an hour, when nobody makes it."""
    return f"import os, time\nfor _ in range(180_000): os.path.exists({str(path)!r}) and os._exit(0); time.sleep(0.01)"


def test_jobs_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.torch, "get_num_threads", lambda: 9)
    told, seen = "import os; print(os.environ['OMP_NUM_THREADS'])", Seen()

    def threads(at_once):
        ran = job(tmp_path, f"of-{at_once}", told)
        run_jobs([ran], at_once, seen.began, seen.ended)
        return int(ran.log.read_text().split()[-1])

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads(at_once) for at_once in (1, 4, 20)] == [9, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(5) == 3, "what a user sets is kept"


def test_at_most_so_many_at_once_and_each_after_what_it_waits_for(tmp_path):
    """c waits for a, which is slow: d goes before it.  What is none of the jobs is there already."""
    slow = until(tmp_path / "logs" / "d.txt")
    names = [job(tmp_path, "a", slow), job(tmp_path, "b", after=["there"]), job(tmp_path, "c", after=["a"])]
    names += [job(tmp_path, "d"), job(tmp_path, "e", after=["a", "d"])]
    seen = Seen()
    run_jobs(names, 2, seen.began, seen.ended)
    order = seen.events.index
    assert seen.most == 2
    assert seen.events[:2] == ["+a", "+b"]
    assert order("+c") > order("-a 0")
    assert order("+d") < order("+c")
    assert order("+e") > max(order("-a 0"), order("-d 0"))
    assert len(seen.events) == 10


def test_one_that_fails(tmp_path):
    """The other finishes, no third is begun, and the line says which failed and what it said last."""
    there = tmp_path / "there"
    fails = "import sys; print('begun'); sys.exit('unmask: no such folder\\n\\n')"
    names = [job(tmp_path, "a", fails), job(tmp_path, "b", until(there)), job(tmp_path, "c")]
    seen = Seen()

    def ended(*how):
        seen.ended(*how)
        there.touch()  # b ends once it is known that a has failed

    with pytest.raises(JobError) as caught:
        run_jobs(names, 2, seen.began, ended)
    log = tmp_path / "logs" / "a.txt"
    assert str(caught.value) == f"a failed with exit code 1: no such folder (all that it wrote is in {log})"
    assert seen.events == ["+a", "+b", "-a 1", "-b 0"]
    with pytest.raises(JobError):
        run_jobs([job(tmp_path, "a", fails)], 2, seen.began, seen.ended)
    assert log.read_text().count("\nbegun\n") == 2, "what the first attempt wrote is kept"


def test_one_that_dies_without_a_word(tmp_path):
    """Its command is the last line then, not what an earlier attempt said."""
    code = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(JobError, match=r"a failed with exit code -9: \$ .*os\.kill"):
        run_jobs([job(tmp_path, "a", code)], 1, lambda job: None, lambda *how: None)


def test_without_a_log_it_writes_to_the_terminal(tmp_path, capfd):
    code = "import sys; print('progress', file=sys.stderr); print('done'); sys.exit(3)"
    with pytest.raises(JobError, match=r"^a failed with exit code 3: what it wrote is above$"):
        run_jobs([job(tmp_path, "a", code)._replace(log=None)], 1, lambda job: None, lambda *how: None)
    assert capfd.readouterr() == ("done\n", "progress\n")


@pytest.mark.parametrize(("sent", "raised"), [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_is_passed_on_and_all_are_waited_for(tmp_path, sent, raised):
    """One job sends it to this process once the others are ready."""
    seen, names = Seen(), [job(tmp_path, name, SAVES) for name in "ab"]
    logs = [str(one.log) for one in names]
    sends = (
        f"import os, time\nwhile not all(os.path.exists(p) and '\\nready' in open(p).read() for p in {logs}): "
        f"time.sleep(0.01)\nos.kill(os.getppid(), {int(sent)}); time.sleep(1800)"
    )
    names += [job(tmp_path, "c", sends), job(tmp_path, "d")]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    try:
        with pytest.raises(raised):
            run_jobs(names, 3, seen.began, seen.ended)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(seen.events) == ["+a", "+b", "+c", "-a 75", "-b 75", "-c -15"]
    assert all(one.log.read_text().endswith("\nready, apart: True\nsaved\n") for one in names[:2])
