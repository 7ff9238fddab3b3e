"""What holds for the decision of every rule.  Each rule against its own definition: test_policies_<family>.py."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.decoding.small import BUILT_IN
from tests.decoding.steps import FREQUENCIES, case_of, places, random_case
from unmask.decoding.policies import Decision, Step, parse_policy
from unmask.variational.selection import Bernoulli, NonEmpty


class FromHidden:
    """Logits from what it is given, row by row."""

    budget, prices = None, ()

    def __init__(self, selection):
        self.selection = selection

    def __call__(self, hidden, confidences, masked, t, attention_mask, max_steps, price):
        return 3 * hidden.sum(-1) + confidences.sum(-1) + t[:, None]


NAMES = [  # every rule, and those of its parameters that take another way through its code
    *("iid", "top-prob", "margin", "entropy", "left-to-right", "stochastic(top-prob(confidence=sampled),0.5)"),
    *("margin(count=floor)", "entropy(count=cosine)", "random"),
    *("threshold(0.7,paced)", "factor(1,confidence=sampled)", "eb(0.5,order=margin)", "klass(0.5,0.5,1)", "dus"),
    *("blocks(3,iid)", "blocks(3,klass(0.5,0.5,1))"),
    *("rdm", "rdm(linear,cond)", "p2", "remdm-cap:0.4", "remdm-rescale:0.4", "remdm-conf"),
    *("joint-threshold(0.6,0.3)", "saber", "prophet(2,3)", "credit", "pc-sampler", "wino"),
    *("blocks(3,rdm)", "blocks(3,joint-threshold(0.6,0.3))", "blocks(3,wino)", "blocks(3,remdm-cap:0.4)"),
    *("learned", "learned(temperature=0.5,floor=0.1,cap=2)", "learned(deterministic)", "lo-arm", "reward"),
]
POLICIES = {name: parse_policy(name, FromHidden(NonEmpty()), lambda: FREQUENCIES) for name in NAMES}
POLICIES["learned, bernoulli"] = parse_policy("learned", FromHidden(Bernoulli()))


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


def test_no_rule_is_left_out():
    assert {type(policy) for policy in POLICIES.values()} == set(BUILT_IN.values())


def a_step(policy, seed=50):
    """Nothing but what the rule declares that it reads, and a memory in which something stands."""
    case = random_case(seed, reads_revealed=policy.reads_revealed)
    rows, L = case.step.masked.shape
    generator = torch.Generator().manual_seed(seed)
    stats = case.step.stats | {"change": torch.rand(rows, L, dtype=torch.float64, generator=generator)}
    memory = {
        name: torch.randint(0, 3, kept.shape, generator=generator).to(kept.dtype)
        for name, kept in policy.init_state(rows, L, torch.device("cpu")).items()
    }
    seen = {"stats": {name: stats[name] for name in policy.reads}}
    if not policy.reads:  # decides before the pass
        seen |= {"proposal": torch.empty(0), "states": lambda: torch.empty(0)}
    return replace(case.step, max_steps=case.step.max_steps + 3, memory=memory, **seen)  # a step for every block


def test_it_reads_what_it_declares_and_answers_in_booleans():
    for policy in POLICIES.values():
        step = a_step(policy)
        decision = policy.decide(step)
        assert decision.reveal.dtype == torch.bool
        assert decision.reveal.shape == step.masked.shape
        assert (decision.remask is not None or decision.edit is not None) == policy.remasks
        for revised in (decision.remask, decision.edit):
            assert revised is None or (revised.dtype, revised.shape) == (torch.bool, step.masked.shape)
        for rows in (decision.nothing_selected, decision.finished):
            assert rows is None or (rows.dtype, rows.shape) == (torch.bool, step.index.shape)
        assert set(decision.memory or {}) == set(policy.init_state(1, 1, torch.device("cpu")))
        for name, kept in (decision.memory or {}).items():
            assert kept.shape == step.memory[name].shape
            assert kept.dtype == step.memory[name].dtype


def picked(value, rows):
    if isinstance(value, dict):
        return {name: tensor[rows] for name, tensor in value.items()}
    return value[rows] if isinstance(value, Tensor) and value.numel() else value


def test_no_row_sees_another(policy):
    """Alone, and among others in another order, a row gets the same answer."""
    step = a_step(policy)
    together = policy.decide(step)
    rows = len(step.index)
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for some in [shuffled, *(torch.tensor([row]) for row in range(0, rows, 7))]:
        part = {field.name: picked(getattr(step, field.name), some) for field in fields(Step)}
        u, hidden = step.uniforms()[some], picked(step.hidden, some)
        apart = policy.decide(Step(**part | {"uniforms": lambda u=u: u, "states": lambda hidden=hidden: hidden}))
        for name in Decision._fields:
            expected, found = picked(getattr(together, name), some), getattr(apart, name)
            if isinstance(expected, dict):
                assert all(torch.equal(found[key], kept) for key, kept in expected.items())
            elif expected is not None:
                assert torch.equal(found, expected)


def test_it_leaves_what_it_is_told_alone():
    for policy in POLICIES.values():
        step = a_step(policy)
        before = {field.name: getattr(step, field.name) for field in fields(Step)}
        copies = {name: value.clone() for name, value in before.items() if isinstance(value, Tensor)}
        copies |= {
            f"{kind} {name}": value.clone() for kind in ("stats", "memory") for name, value in before[kind].items()
        }
        policy.decide(step)
        for name, value in copies.items():
            kind, _, key = name.partition(" ")
            assert torch.equal(before[kind][key] if key else before[name], value)


def test_it_works_in_float32_too():
    """What a model in half precision gives: float32 numbers, float64 draws."""
    for policy in POLICIES.values():
        step = a_step(policy)
        stats = {name: values.float() for name, values in step.stats.items()}
        decision = policy.decide(replace(step, stats=stats, states=lambda step=step: step.hidden.float()))
        agree = (decision.reveal & step.masked) == (policy.decide(step).reveal & step.masked)
        assert agree.double().mean() > 0.99


def test_a_step_knows_its_count_and_its_places():
    case = case_of(random_case(51).rows)
    assert case.step.count().tolist() == [row.k for row in case.rows]
    for row, place in zip(case.rows, case.step.place().tolist(), strict=True):
        assert [place[n] for n in row.response] == list(range(row.N))
    assert torch.equal(case.step.response, places([row.response for row in case.rows], len(case.rows[0].weights)))
