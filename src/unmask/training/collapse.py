"""The collapse guard: an order or a denoiser that was good and is no longer, told from the numbers of every update.

It has collapsed where, smoothed over the last updates,
    the bound has fallen:                       `DROP` nats per token below the best that it was, or, of an order,
    the posterior reveals everything at once:   E_Q[steps] < 1 + 1/20 of the way to the budget, or
    the scores are saturated:                   nearly all of them within 1/1000 of 0 or 1, where no gradient passes,
and this has lasted for `PATIENCE` updates.  Noise of single updates is not reported.  Of a selector that is its own
posterior, what is watched as the bound is its value: J_lambda, or the reward less the price of the steps.

With on_collapse = "restore" the guard keeps copies of the weights while they do well.  After a collapse it brings the
best ones back, without momentum, at a smaller learning rate, which warms up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unmask.training.tensors import copied, copy_into

DECAY = {"elbo": 0.98, "value": 0.98, "q_steps": 0.9, "saturated": 0.9}  # of the smoothing: the bound is the noisiest
PATIENCE = 50  # updates
DROP = {"order": 0.5, "denoiser": 0.25}  # nats per response token; an order's bound is the noisier one
ADVICE = {
    "order": "smaller learning rates, a larger kl_weight or lower prices",
    "denoiser": "a smaller learning_rate, a longer warmup",
}
SATURATED = 0.99  # of the scores


class CollapseGuard:
    """Watches the metrics of every update.

    budget: T of an order; None: a denoiser alone is trained.
    restored_rate: see `Optimisation`; 0: nothing is restored.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, budget: int | None, restored_rate: float
    ) -> None:
        self.parameters, self.optimizer, self.restored_rate = parameters, optimizer, restored_rate
        self.what = "denoiser" if budget is None else "order"
        self.fewest_steps = 1 + ((budget or 1) - 1) / 20
        self.best: dict[str, Tensor] = {}  # weights that have proved good
        self.candidate: dict[str, Tensor] = {}  # later ones that have yet to
        self.candidate_at = 0  # the update that they are from
        self.rate_scale = 1.0  # below 1 once weights were restored
        self.restored_at: int | None = None  # the update after which that was, the last time
        self._forget()

    def _forget(self) -> None:
        self.smooth: dict[str, float] = {}
        self.best_bound = float("-inf")
        self.since: dict[str, int] = {}  # for each sign of collapse, the updates that it has lasted
        self.seen = 0

    def after_update(self, update: int, recorded: Mapping[str, float]) -> str | None:
        """Take in the metrics of an update; what there is to report of a collapse.  May restore the weights."""
        why = self.watch(recorded)
        if self.restored_rate and self.at_best:
            self._keep(update)
        elif self.in_doubt:
            self.candidate = {}  # it may have been taken just as they fell
        if why is None:
            return None
        event = f"THE {self.what.upper()} HAS COLLAPSED: {why}"
        if self.best:
            self._restore(update)
            return f"{event}; the best {self.what} is restored, learning rates times {self.rate_scale:g}"
        none, instead = f": there is no better {self.what} to restore", ", or on_collapse = 'restore'"
        return f"{event}; try {ADVICE[self.what]}{none if self.restored_rate else instead}"

    def watch(self, recorded: Mapping[str, float]) -> str | None:
        """Take in the metrics of an update; why it is a collapse, told once for each reason."""
        self.seen += 1
        for key, decay in DECAY.items():
            if key in recorded:  # a mean with the weights decay^j, j updates back
                step = (1 - decay) / (1 - decay**self.seen)
                self.smooth[key] = (1 - step) * self.smooth.get(key, 0.0) + step * recorded[key]
        self.best_bound = max(self.best_bound, self.bound)
        steps, saturated = self.smooth.get("q_steps", float("inf")), self.smooth.get("saturated", 0.0)
        what, unit = ("value", "") if "value" in recorded else ("bound", " nats per token")
        fallen = f"the {what} is {self.bound:.2f}{unit}, its best was {self.best_bound:.2f}"
        signs = {
            f"Q takes {steps:.2f} steps: it reveals everything at once": steps < self.fewest_steps,
            "the scores are saturated: all but 1 in 100 are 0 or 1": saturated > SATURATED,
            fallen: self.bound < self.best_bound - DROP[self.what],
        }
        found = None
        for number, (why, present) in enumerate(signs.items()):
            sign = str(number)
            self.since[sign] = self.since.get(sign, 0) + 1 if present else 0
            if self.since[sign] == PATIENCE:
                found = found or why
        return found

    @property
    def bound(self) -> float:
        """Smoothed; minus infinity until there is something to smooth."""
        known = self.smooth.get("value", self.smooth.get("elbo"))
        return known if self.seen >= PATIENCE and known is not None else float("-inf")

    @property
    def at_best(self) -> bool:
        """Never while there is a sign of collapse: restoring that would not help."""
        return self.seen >= PATIENCE and self.bound == self.best_bound and not self.in_doubt

    @property
    def in_doubt(self) -> bool:
        """Whether there is a sign of collapse, which may pass."""
        return any(self.since.values())

    def rate_factor(self, update: int) -> float:
        """Of the learning rates, beside their schedule."""
        if self.restored_at is None:
            return 1.0
        return self.rate_scale * min(1.0, (update - self.restored_at + 1) / PATIENCE)

    def _keep(self, update: int) -> None:
        """The weights do well.  They become the best when they still do so `PATIENCE` updates later.

        A bound is that of the weights before its update, and on a GPU it is read an update late: when it says that all
        is well, the weights may have been lost in between.
        """
        if self.candidate:
            if update - self.candidate_at < PATIENCE:
                return
            self.best = self.candidate
        self.candidate, self.candidate_at = copied(self.parameters), update

    def _restore(self, update: int) -> None:
        copy_into(self.parameters, self.best)
        self.candidate = {}
        self.optimizer.state.clear()
        self.rate_scale *= self.restored_rate
        self.restored_at = update
        self._forget()

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FACTS}

    def load(self, facts: Mapping[str, Any], best: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> None:
        for name in _FACTS:
            setattr(self, name, copy(facts[name]))
        for name, saved in (("best", best), ("candidate", candidate)):
            if saved:
                setattr(self, name, copied(self.parameters))
                copy_into(getattr(self, name), saved)


_FACTS = ("smooth", "best_bound", "since", "seen", "rate_scale", "restored_at", "candidate_at")
