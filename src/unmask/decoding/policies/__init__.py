"""Which positions to reveal: one small class a rule, and the one place where strings become rules.

Notation: step i = 0..S-1 of a budget of S, M = the masked positions of one sequence, N = the size of its response,
p_n = the denoiser's distribution at n, x_n = the token proposed there, c_n = max_v p_n(v) (with `confidence="sampled"`
p_n(x_n)), H_n = the entropy of p_n in nats.  Ties go to the leftmost position.  Everything is per sequence: no rule
looks at another row.  The last step reveals all that is left, and the generation loop sees to that, not the rule.

    rule.py        what a rule is told (Step), what it answers (Decision), what it declares (Policy)
    ranked.py      a score ranks the masks, a count cuts: top-prob, margin, entropy, left-to-right, stochastic
    adaptive.py    as many as the denoiser is sure of: threshold, factor, eb, klass
    structured.py  by position or by chance: iid, dus, blocks
    remasking.py   second thoughts: rdm, p2, remdm-cap, remdm-rescale, remdm-conf
    network.py     a network decides: learned, lo-arm, reward
"""

from unmask.decoding.policies.adaptive import EntropyBounded, Factor, KLStable, Threshold
from unmask.decoding.policies.names import RULES, check_policy, parse_policy
from unmask.decoding.policies.network import (
    Learned,
    NetworkPolicy,
    OneAtATime,
    RewardTrained,
    ScoringNetwork,
    SelectorNetwork,
)
from unmask.decoding.policies.ranked import Entropy, LeftToRight, Margin, Ranked, Stochastic, TopProbability
from unmask.decoding.policies.remasking import P2, RDM, ReMDMCap, ReMDMConf, ReMDMRescale
from unmask.decoding.policies.rule import Decision, Policy, Step
from unmask.decoding.policies.structured import IID, Blocks, Dilated

__all__ = [
    "IID",
    "P2",
    "RDM",
    "RULES",
    "Blocks",
    "Decision",
    "Dilated",
    "Entropy",
    "EntropyBounded",
    "Factor",
    "KLStable",
    "Learned",
    "LeftToRight",
    "Margin",
    "NetworkPolicy",
    "OneAtATime",
    "Policy",
    "Ranked",
    "ReMDMCap",
    "ReMDMConf",
    "ReMDMRescale",
    "RewardTrained",
    "ScoringNetwork",
    "SelectorNetwork",
    "Step",
    "Stochastic",
    "Threshold",
    "TopProbability",
    "check_policy",
    "parse_policy",
]
