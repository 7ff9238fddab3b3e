"""The exact posterior of a task in place of a network: what goes wrong is then the order's doing alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from unmask.errors import UserError
from unmask.tasks import TASKS, task_class
from unmask.tasks.task import Task

EXACT = "exact"  # what records call it as a model; as a denoiser, `fingerprint`


class ExactDenoiser:
    """mu^n(x) = p(x_n | what is revealed in x), a denoiser for `generate`; only for a task that knows it."""

    keeps_no_tensors = True
    eos_token_id = tokenizer = context_length = None  # as `load_denoiser` gives them

    def __init__(self, task: Task) -> None:
        self.task, self.mask_token_id = task, len(task.vocabulary)
        self.hidden(task.examples(torch.arange(1), "test").tokens)  # or says that it is not known

    @property
    def fingerprint(self) -> str:
        """What stands for its weights in records: another one for every task, with its options."""
        return f"{EXACT}-{hashlib.sha256(repr(self.task).encode()).hexdigest()[:6]}"

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, L, V]: the log-probabilities themselves."""
        log_p = self.task.log_posterior(tokens)
        if log_p is None:
            raise _not_known(self.task.name)
        return log_p.float()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def check_exact(name: str) -> None:
    """Raise UserError where a task of unmask's own does not know its posterior: building it may take minutes."""
    if name in TASKS and not _knows(name):
        raise _not_known(name)


def _knows(name: str) -> bool:
    return task_class(name).log_posterior is not Task.log_posterior


def _not_known(name: str) -> UserError:
    known = ", ".join(filter(_knows, TASKS))
    return UserError(f"the exact posterior of task {name} is not known: choose from {known}")
