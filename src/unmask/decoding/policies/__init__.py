"""Which positions to reveal: one small class per rule, and the one place where strings become rules.

Notation: step i = 0..S-1 with S = max_steps, M = the masked positions of one sequence, N = the size of its response,
p_n = the denoiser's distribution at n, x_n = the token proposed there, c_n = max_v p_n(v) (with `confidence="sampled"`
p_n(x_n)), H_n = the entropy of p_n in nats.  Ties go to the leftmost position.  Everything is per sequence: no rule
looks at another row.  The last step reveals all that is left, and the generation loop sees to that, not the rule.

A rule is registered by being defined, in the order of the imports below; `unmask policies` lists them in this order.
"""

# ruff: noqa: F403, I001
from unmask.decoding.policies.rule import *  # what a rule is told (Step), answers (Decision), declares (Policy)
from unmask.decoding.policies.scheduled import *  # as many as the schedule says: iid; by a score: top-prob, margin, ...
from unmask.decoding.policies.structured import *  # by position: dus; any rule inside blocks
from unmask.decoding.policies.adaptive import *  # as many as the denoiser is sure of: threshold, eb, klass, ...
from unmask.decoding.policies.remasking import *  # may mask again what was revealed: rdm, p2, remdm-...
from unmask.decoding.policies.network import *  # a network decides: learned, lo-arm, reward
from unmask.decoding.policies.names import *  # parse_policy


def __dir__() -> list[str]:
    return [name for name, value in globals().items() if getattr(value, "__module__", "").startswith(__name__)]
