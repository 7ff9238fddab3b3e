"""A task of the user's own that breaks the contract is refused before anything is trained."""

from dataclasses import dataclass, replace

import pytest
import torch

from unmask.tasks import TASKS, make_task
from unmask.tasks.task import Examples, check_task


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("gsm8k", "text")])  # which need files
def test_every_puzzle_keeps_the_contract(name):
    check_task(make_task(name))


@dataclass(frozen=True)
class Broken:
    tokens: tuple[int, ...] = (0, 1)
    width: int = 2
    name = "broken"
    vocabulary = ("a", "b")
    length = 2
    unconditional, min_steps, entropy, layout = True, None, None, ((0, 1),)

    def examples(self, ids, split):
        tokens = torch.tensor(self.tokens).expand(len(ids), -1)
        everywhere = torch.ones(len(ids), self.width, dtype=torch.bool)
        return Examples(tokens, everywhere, everywhere)

    def valid(self, tokens, examples):
        return tokens[:, 0] == 0


def refused(task):
    with pytest.raises(ValueError, match="task broken") as caught:
        check_task(task)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_broken_task_is_told(monkeypatch):
    check_task(Broken())
    assert "tokens run from 0 to 2, but the vocabulary has the ids 0 to 1" in refused(replace(Broken(), tokens=(0, 2)))
    assert "response of shape [2, 3], expected [2, 2]" in refused(replace(Broken(), width=3))
    monkeypatch.delattr(Broken, "valid")
    assert "has no 'valid'" in refused(Broken())
