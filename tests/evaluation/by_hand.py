"""Records made by hand, and lines of results.jsonl without their nesting."""

import dataclasses
from dataclasses import fields, replace
from types import SimpleNamespace

from tests.training.small import json_lines
from unmask.evaluation.records import EvaluationSpec, Outcome, Record

SPEC_FIELDS = {field.name for field in fields(EvaluationSpec)}
LEARNED = Record(
    EvaluationSpec(
        task="groups",
        model="2x48",
        policy="learned",
        trained_budget=2,
        budget=2,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        guidance=0.0,
        eos_policy="none",
        seed=0,
        num_examples=1000,
        split="test",
        precision="no",
        trained_seed=None,
        selector="nonempty",
        selector_weights=None,
        denoiser="0123456789ab",
        plain_denoiser=None,
        examples=None,
    ),
    Outcome(
        score=0.973,
        ci_low=0.961,
        ci_high=0.981,
        mean_steps=1.98,
        fewest_steps=1,
        most_steps=2,
        num_forwards=1980,
        mean_passes=None,
        mean_revisions=None,
        nothing_selected=0.0,
        distinct=870,
        distinct_low=850,
        distinct_high=890,
        metrics={},
        seconds=1.5,
        device="cpu",
        compile=False,
        revision="0.1.0",
    ),
)


def changed(record, verdicts=None, **values):
    """The record with other values of its spec and its outcome."""
    spec = {name: value for name, value in values.items() if name in SPEC_FIELDS}
    outcome = {name: value for name, value in values.items() if name not in SPEC_FIELDS}
    return Record(replace(record.spec, **spec), replace(record.outcome, **outcome), verdicts or record.verdicts)


def heuristic(policy, budget, **values):
    return changed(
        LEARNED, policy=policy, trained_budget=None, budget=budget, selector=None, nothing_selected=None, **values
    )


def flat_lines(path):
    """The lines of a results.jsonl, spec and outcome in one dictionary."""
    return [{"key": line["key"], **line["spec"], **line["outcome"]} for line in json_lines(path)]


def flat(record):
    """Spec, outcome and the pictured reveal steps of a record side by side."""
    own = {"diverse": record.outcome.is_varied, "reveal_step": record.verdicts.reveal_step}
    return SimpleNamespace(**dataclasses.asdict(record.spec), **dataclasses.asdict(record.outcome), **own)
