"""Strings become rules here and nowhere else: `margin`, `threshold:0.9`, `blocks(32,stochastic(margin,0.5))`."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from typing import Any, cast, get_type_hints

from unmask.decoding.policies.adaptive import EntropyBounded, Factor, KLStable, Threshold
from unmask.decoding.policies.network import Learned, NetworkPolicy, OneAtATime, RewardTrained, SelectorNetwork
from unmask.decoding.policies.ranked import Entropy, LeftToRight, Margin, Stochastic, TopProbability
from unmask.decoding.policies.remasking import P2, RDM, ReMDMCap, ReMDMConf, ReMDMRescale
from unmask.decoding.policies.rule import Policy, default, written
from unmask.decoding.policies.structured import IID, Blocks, Dilated
from unmask.errors import UserError, did_you_mean
from unmask.fields import convert

_CLASSES: tuple[type[Policy], ...] = (
    *(IID, TopProbability, Margin, Entropy, LeftToRight, Stochastic),
    *(Threshold, Factor, EntropyBounded, KLStable, Dilated, Blocks),
    *(RDM, P2, ReMDMCap, ReMDMRescale, ReMDMConf),
    *(Learned, OneAtATime, RewardTrained),
)
RULES: dict[str, type[Policy]] = {rule.key: rule for rule in _CLASSES}


def parse_policy(text: str, network: SelectorNetwork | None = None) -> Policy:
    """The rule that `text` names.  `network` is the selector of the rules that need one."""
    if text.count("(") > 8:
        raise UserError(f"cannot read a policy with {text.count('(')} brackets: no rule nests so deep")
    match = re.fullmatch(r"\s*([a-z0-9-]+)\s*(?::\s*([^:()]+)|\((.*)\))?\s*", text, flags=re.DOTALL)
    if match is None:
        raise UserError(f"cannot read the policy {text!r}: write it as margin, threshold:0.9 or blocks(32,margin)")
    key, single, several = match.groups()
    if key not in RULES:
        raise UserError(f"unknown policy {key!r}; {did_you_mean(key, RULES)}choose from {', '.join(RULES)}")
    rule = RULES[key]
    arguments = [single] if single is not None else _split(several, text) if several and several.strip() else []
    values: dict[str, Any] = {}
    if issubclass(rule, NetworkPolicy):
        if network is None:
            raise UserError(f"{key} needs a learned order, and there is none: train one with an [order] section")
        values["network"] = network
    types, positional = get_type_hints(rule), [p for p in parameters(rule) if not p.kw_only]
    for place, argument in enumerate(part.strip() for part in arguments):
        name, equals, value = argument.partition("=")
        # `deterministic` alone sets a switch; an `=` inside brackets belongs to a rule in there.
        if not re.fullmatch(r"[a-z_]+", name.strip()) or (not equals and types.get(name) is not bool):
            if place >= len(positional):
                raise UserError(f"{text!r}: {usage(rule)} has no place for {argument!r}")
            name, value = positional[place].name, argument
        elif not equals:
            value = "true"
        name = name.strip()
        if name not in {p.name for p in parameters(rule)}:
            raise UserError(f"{text!r}: {key} has no parameter {name!r}; write it as {usage(rule)}")
        if name in values:
            raise UserError(f"{text!r}: {name} is given twice")
        values[name] = _value(value.strip(), types[name], f"{text!r}: {name}", network)
    missing = [p.name for p in positional if p.name not in values and default(p) is MISSING]
    if missing:
        raise UserError(f"{text!r}: {' and '.join(missing)} missing; write it as {usage(rule)}")
    return rule(**values)


def check_policy(text: str) -> None:
    """ValueError where `text` names no rule, whether or not there is a network for it yet."""
    parse_policy(text, network=cast(SelectorNetwork, object()))


def parameters(rule: type[Policy]) -> list[Field[Any]]:
    """What a string may say about a rule: all of its fields but the network."""
    return [field for field in fields(rule) if field.repr]  # type: ignore[arg-type]


def usage(rule: type[Policy]) -> str:
    """How a rule is written, with its defaults: `threshold(0.9,confidence=max,paced=false)`."""
    shown = []
    for parameter in parameters(rule):
        value = parameter.name.upper() if default(parameter) is MISSING else written(default(parameter))
        shown.append(f"{parameter.name}={value}" if parameter.kw_only else value)
    return f"{rule.key}({','.join(shown)})" if shown else rule.key


def _split(arguments: str, text: str) -> list[str]:
    """At the commas that are not inside brackets."""
    depth, parts = 0, [""]
    for letter in arguments:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth != 0:
        raise UserError(f"cannot read the policy {text!r}: its brackets do not match")
    return parts


def _value(text: str, wanted: Any, what: str, network: SelectorNetwork | None) -> Any:
    """A parameter's text as the type that its field declares."""
    if isinstance(wanted, type) and issubclass(wanted, Policy):
        return parse_policy(text, network)
    value: Any = {"true": True, "false": False}.get(text, text)
    if wanted in (int, float):
        with suppress(ValueError):  # what is no number stays text, which `convert` refuses
            value = wanted(text)
    if type(value) is int and abs(value) >= 2**31:
        raise UserError(f"{what} must be below 2^31, got {text!r}")
    return convert(wanted, value, what)
