"""The paper's mathematics: posterior over orders, bound, estimators, and exact enumeration for tiny models."""

from unmask.variational.elbo import BoundTerms, bound_terms
from unmask.variational.estimators import (
    Baseline,
    BoundEstimate,
    LeaveOneOut,
    MovingAverage,
    NoBaseline,
    estimate_bound,
)
from unmask.variational.posterior import Trajectories, log_prob, log_reveal, sample_times, sample_trajectories
from unmask.variational.selection import Bernoulli, NonEmpty, Selection

__all__ = [
    "Baseline",
    "Bernoulli",
    "BoundEstimate",
    "BoundTerms",
    "LeaveOneOut",
    "MovingAverage",
    "NoBaseline",
    "NonEmpty",
    "Selection",
    "Trajectories",
    "bound_terms",
    "estimate_bound",
    "log_prob",
    "log_reveal",
    "sample_times",
    "sample_trajectories",
]
