"""Rules of others: how they are named, whatever they read, and what they forget to declare."""

import re
import sys
from dataclasses import dataclass, field

import pytest
import torch

from tests.decoding.small import DENOISER, MASK, PROMPTS, accounts, all_results
from unmask.decoding.confidence import Confidence
from unmask.decoding.generate import generate
from unmask.decoding.policies import RULES, Decision, Policy, own_rules, parse_policy
from unmask.decoding.policies.rule import highest
from unmask.errors import UserError

pytestmark = pytest.mark.usefixtures("uncompiled")


@dataclass(frozen=True)
class Reads(Policy):
    """Reveals by one reading alone, and is given no junk."""

    key = "reads"
    reading: str = "margin"
    at_once: bool = field(default=False, kw_only=True)

    @property
    def reads(self):
        return {self.reading}

    def decide(self, step):
        value = step.stats[self.reading]
        if self.reading == "change" and not self.at_once:  # the first pass has none before it
            value = torch.where(step.index[:, None] > 0, value, 0.0)
        return Decision(highest(value, step.masked, step.count()))


@dataclass(frozen=True)
class Everywhere(Reads):
    reads_revealed = True


@dataclass(frozen=True)
class Doubts(Policy):
    """Reveals k_i from the left, and masks again the one that is now least probable, by log_current alone."""

    key = "doubts"
    remasks = reads_revealed = True
    reads = frozenset({"log_current"})

    def decide(self, step):
        revealed = step.response & ~step.masked
        log_p = step.stats["log_current"]
        assert ((log_p <= 0) & torch.isfinite(log_p))[revealed].all()
        one = torch.ones_like(step.index)
        return Decision(highest(-step.place().double(), step.masked, step.count() + 1), highest(-log_p, revealed, one))


OWN_RULE = """
from dataclasses import dataclass
from unmask.decoding.policies import Decision, Policy

@dataclass(frozen=True)
class Clear(Policy):
    key = "ownrule"
    gap: float = 0.5
    note: str = ""

    def __post_init__(self):
        if self.gap < 0:
            raise ValueError("gap must not be negative")

    def decide(self, step):
        return Decision(step.masked)

class Keyless(Policy):
    pass

number = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module in the current folder."""
    (tmp_path / "ownrule.py").write_text(OWN_RULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    RULES.pop("ownrule", None)
    sys.modules.pop("ownrule", None)


def test_a_rule_by_its_module_and_class(own_module):
    assert own_rules("blocks(2,ownrule:Clear(0.3))") == ["ownrule:Clear"]
    assert own_rules("blocks(2,rdm:linear)") == own_rules("top-prob:confidence=sampled") == []
    assert "ownrule" not in sys.modules, "a name alone imports nothing"
    rule = parse_policy("ownrule:Clear(0.3,note=why)")
    assert (type(rule).__name__, rule.gap, rule.note) == ("Clear", 0.3, "why")
    assert parse_policy("blocks(2, ownrule:Clear)").inner.gap == 0.5
    assert parse_policy(type(rule)(0.3).name) == parse_policy("ownrule(0.3,)") == type(rule)(0.3)
    assert generate(DENOISER, PROMPTS, "ownrule:Clear", 4).num_steps.tolist() == [1] * len(PROMPTS)


def test_a_rule_that_cannot_be_used_by_its_module_and_class(own_module):
    for text, message in (
        ("nowhere_at_all:Clear", "policy 'nowhere_at_all:Clear' cannot be imported: No module named 'nowhere_at_all'"),
        ("ownrule:Other", "policy 'ownrule:Other' cannot be imported: module 'ownrule' has no attribute 'Other'"),
        ("own-rule:Clear", "policy 'own-rule:Clear': write a policy of your own as module:Class"),
        ("ownrule:number", "must be a dataclass derived from unmask.policies.Policy, with a key"),
        ("ownrule:Keyless", "must be a dataclass derived from unmask.policies.Policy, with a key"),
        ("ownrule:Clear(-1)", "policy 'ownrule:Clear(-1)': gap must not be negative"),
        ("ownrule:Clear(gp=1)", "ownrule has no parameter 'gp'; write it as ownrule(0.5,)"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            parse_policy(text)


def test_a_key_names_one_rule():
    """Records know a rule by its key."""
    with pytest.raises(UserError, match="Another: the key 'margin' is that of Margin: choose another"):
        type("Another", (Policy,), {"key": "margin"})
    again = [type("Again", (Policy,), {"key": "again"}) for _ in range(2)]
    assert RULES.pop("again") is again[1], "a class that is defined again, in a notebook, replaces itself"


def laid_out_alike(policy):
    """Alone, in a batch that is refilled, with fixed shapes: the results are those of a whole batch."""
    whole = generate(DENOISER, PROMPTS, policy, 4)
    assert (whole.tokens[whole.attention_mask] != MASK).all()
    for options in ({"batch_size": 1}, {"batch_size": 2}, {"compile": True}, {"batch_size": 2, "compile": True}):
        assert all_results(generate(DENOISER, PROMPTS, policy, 4, **options)) == all_results(whole), options
    return whole


@pytest.mark.parametrize("reading", Confidence.__annotations__)
def test_any_reading_alone(reading):
    if reading != "log_current":  # at a mask, no token stands
        laid_out_alike(Reads(reading))
    laid_out_alike(Everywhere(reading))


def test_a_change_at_the_first_pass_is_from_no_other_sequence():
    """Not from the one that had the place in the batch before, nor from the call before."""
    for rule in (Reads, Everywhere):
        laid_out_alike(rule("change", at_once=True))


def test_what_stands_there_alone():
    assert laid_out_alike(Doubts()).revisions.sum() > 0


def test_unsound_logits_are_seen_whatever_is_read():
    """A change of -inf or NaN, or the probability of a token that stands there, would not show it."""
    for rule, reading in ((Everywhere, "log_current"), (Reads, "change"), (Reads, "entropy")):
        for compile in (False, True):

            class Broken:
                mask_token_id = MASK

                def hidden(self, tokens, attention_mask=None):
                    return DENOISER.hidden(tokens, attention_mask)

                def logits(self, hidden):
                    return torch.full_like(DENOISER.logits(hidden), torch.nan)

            with pytest.raises(ValueError, match="the denoiser's logits are not finite for sequence 0 at step 0"):
                generate(Broken(), PROMPTS, rule(reading), 4, compile=compile)


def test_a_reading_that_does_not_exist():
    for reading in ("peak", ""):
        said = f"reads:{reading} reads {reading}; a rule can read log_top, margin"
        with pytest.raises(UserError, match=said) as caught:
            generate(DENOISER, PROMPTS, Reads(reading), 4)
        for known in Confidence.__annotations__:
            assert known in str(caught.value)


@dataclass(frozen=True)
class Forgets(Policy):
    """Masks again what it has revealed, and does not say so."""

    key = "forgets"
    looks: bool = False

    @property
    def reads(self):
        return frozenset({"margin"} if self.looks else ())

    def decide(self, step):
        return Decision(highest(-step.place().double(), step.masked, step.count()), remask=~step.masked)


def test_a_rule_that_re_masks_must_say_so():
    """Or it would be taken for finished when nothing is masked, and never run all its steps."""
    for looks in (False, True):
        said = f"forgets:{str(looks).lower()} masks again what was revealed: it must declare `rem"
        for options in ({}, {"batch_size": 2}, {"compile": True}):
            with pytest.raises(UserError, match=said):
                generate(DENOISER, PROMPTS, Forgets(looks), 4, **options)


@dataclass(frozen=True)
class Rewrites(Policy):
    """From left to right, and every token that stands becomes the proposal."""

    key = "rewrites"
    remasks = True
    looks: bool = True

    @property
    def reads(self):
        return frozenset({"log_top"} if self.looks else ())

    def decide(self, step):
        return Decision(highest(-step.place().double(), step.masked, step.count()), edit=~step.masked)


class RewritesAll(Rewrites):
    reads_revealed = True


def test_an_edit_is_a_token_that_changes():
    """Steps and revisions by comparing canvas with canvas; the last step edits nothing."""
    for layout in ({}, {"batch_size": 2, "fixed_shapes": True}):
        out = generate(DENOISER, PROMPTS, RewritesAll(), 5, history=True, **layout)
        for row in range(len(PROMPTS)):
            here = out.attention_mask[row]
            reveal_step, revisions = accounts(list(out.history[row, : out.num_steps[row] + 1, here]), edits=True)
            assert out.reveal_step[row, here].tolist() == reveal_step
            assert out.revisions[row, here].tolist() == revisions
        assert out.revisions.sum() > 0
    for rule in (Rewrites(), RewritesAll(looks=False)):
        with pytest.raises(ValueError, match="edits what was revealed: it must declare `reads_revealed = True`"):
            generate(DENOISER, PROMPTS, rule, 5)
