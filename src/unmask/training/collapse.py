"""The collapse guard: an order or a denoiser that was good and is no longer, told from the numbers of every update.

It has collapsed where, smoothed over the last updates,
    the bound has fallen:                       `DROP` nats a token below the best that it was, or, of an order,
    the posterior reveals everything at once:   E_Q[steps] < 1 + 1/20 of the way to the budget, or
    the scores are saturated:                   nearly all of them within 1/1000 of 0 or 1, where no gradient passes,
and this has lasted for `PATIENCE` updates.  Noise of single updates is not reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

DECAY = {"elbo": 0.98, "q_steps": 0.9, "saturated": 0.9}  # of the smoothing: the bound is the noisiest
PATIENCE = 50  # updates
DROP = {"order": 0.5, "denoiser": 0.25}  # nats a response token; an order's bound is the noisier one
ADVICE = {
    "order": "a smaller scorer_rate, a larger kl_weight",
    "denoiser": "a smaller learning_rate, a longer warmup",
}
SATURATED = 0.99  # of the scores


class CollapseGuard:
    """Watches the metrics of the updates of `what`, an order or a denoiser, which has no budget.

    restored_rate: see `Optimisation`; 0 where nothing is restored.
    """

    def __init__(self, what: Literal["order", "denoiser"], budget: int = 1, restored_rate: float = 0.0) -> None:
        self.what, self.drop = what, DROP[what]
        self.fewest_steps, self.restored_rate = 1 + (budget - 1) / 20, restored_rate
        self.reset()

    def reset(self) -> None:
        """Forget everything: the weights were set back."""
        self.smooth: dict[str, float] = {}
        self.best = float("-inf")
        self.since: dict[str, int] = {}  # for each sign of collapse, the updates that it has lasted
        self.seen = 0

    def watch(self, recorded: Mapping[str, float]) -> str | None:
        """Take in the metrics of an update; why it is a collapse, said once for each reason."""
        self.seen += 1
        for key, decay in DECAY.items():
            if key in recorded:  # a mean with the weights decay^j, j updates back
                step = (1 - decay) / (1 - decay**self.seen)
                self.smooth[key] = (1 - step) * self.smooth.get(key, 0.0) + step * recorded[key]
        self.best = max(self.best, self.bound)
        signs = {
            f"Q takes {self.smooth.get('q_steps', 0):.2f} steps: it reveals everything at once": (
                self.smooth.get("q_steps", float("inf")) < self.fewest_steps
            ),
            "the scores are saturated: all but 1 in 100 are 0 or 1": self.smooth.get("saturated", 0.0) > SATURATED,
            f"the bound is {self.bound:.2f} nats a token, its best was {self.best:.2f}": self.bound
            < self.best - self.drop,
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
        return self.smooth["elbo"] if self.seen >= PATIENCE and "elbo" in self.smooth else float("-inf")

    @property
    def at_best(self) -> bool:
        """Never while there is a sign of collapse: that would be restored in vain."""
        return self.seen >= PATIENCE and self.bound == self.best and not self.in_doubt

    @property
    def in_doubt(self) -> bool:
        """Whether there is a sign of collapse, which may pass."""
        return any(self.since.values())

    def facts(self) -> dict[str, Any]:
        return {"smooth": self.smooth, "best": self.best, "since": self.since, "seen": self.seen}

    def load(self, facts: Mapping[str, Any]) -> None:
        self.smooth, self.best = dict(facts["smooth"]), float(facts["best"])
        self.since, self.seen = dict(facts["since"]), int(facts["seen"])
