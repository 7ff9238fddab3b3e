"""Strings become rules here and nowhere else: `margin`, `threshold:0.9`, `blocks(32,stochastic(margin,0.5))`.

A rule of the user's own is written "module:Class" or "module:Class(0.9)".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from unmask.decoding.policies.rule import RULES, NetworkPolicy, Policy, SelectorNetwork, as_text, default_of, fields_of
from unmask.decoding.policies.scheduled import PCSampler
from unmask.errors import UserError, did_you_mean, require
from unmask.fields import convert
from unmask.own_code import import_class

_OWN = r"[\w.-]+:[A-Za-z_]\w*"  # "module:Class", and also `rdm:linear`


def own_rules(text: str) -> list[str]:
    """Each "module:Class" in a policy: to parse the policy is to import these modules and run their code."""
    built_in = {key for key, rule in RULES.items() if rule.__module__.startswith("unmask.")}
    return [name for name in re.findall(_OWN, text) if name.partition(":")[0] not in built_in]


Background = Callable[[], Tensor]


def parse_policy(text: str, network: SelectorNetwork | None = None, background: Background | None = None) -> Policy:
    """The rule that `text` names.

    network: the selector of the rules that need one.  background: gives the frequencies [V] of tokens to `pc-sampler`.
    """
    require(text.count("(") <= 8, f"cannot read a policy with {text.count('(')} brackets: no rule nests so deep")
    rule, arguments = _rule_and_arguments(text)
    values: dict[str, Any] = {}
    if issubclass(rule, NetworkPolicy):
        train = f"train one with an [order] section; in Python, pass {rule.__name__}(selector)"
        require(network is not None, f"{rule.key} needs a learned order, and there is none: {train}")
        values["network"] = network
    if issubclass(rule, PCSampler):
        needed = "pc-sampler needs the frequencies of tokens, and there is no task to count them in"
        require(background is not None, f"{needed}: in Python, pass {rule.__name__}(frequencies)")
        values["frequencies"] = cast(Background, background)()
    types, parameters = get_type_hints(rule), fields_of(rule)
    positional = [parameter.name for parameter in parameters if not parameter.kw_only]
    for place, argument in enumerate(arguments):
        name, equals, value = (part.strip() for part in argument.partition("="))
        # `deterministic` alone sets a switch; an `=` inside brackets belongs to a rule in there.
        if not re.fullmatch(r"[a-z_]+", name) or (not equals and types.get(name) is not bool):
            hint = f"; name it, such as {parameters[0].name}={argument}" if parameters and not positional else ""
            require(place < len(positional), f"{text!r}: {usage(rule)} has no place for {argument!r}{hint}")
            name, value = positional[place], argument
        elif not equals:
            value = "true"
        known = name in [parameter.name for parameter in parameters]
        require(known, f"{text!r}: {rule.key} has no parameter {name!r}; write it as {usage(rule)}")
        require(name not in values, f"{text!r}: {name} is given twice")
        values[name] = _value(value, types[name], f"{text!r}: {name}", network, background)
    missing = [each.name for each in parameters if default_of(each) is MISSING and each.name not in values]
    require(not missing, f"{text!r}: {' and '.join(missing)} missing; write it as {usage(rule)}")
    try:
        return rule(**values)
    except UserError:
        raise
    except ValueError as error:  # a rule of the user's own need not know of UserError
        raise UserError(f"policy {text!r}: {error}") from None


def check_policy(text: str) -> Policy:
    """The rule that `text` names, or UserError, whether or not there is a network or a background for it yet."""
    return parse_policy(text, cast(SelectorNetwork, object()), lambda: torch.ones(1))


def usage(rule: type[Policy]) -> str:
    """How a rule is written, with its defaults: `threshold(0.9,confidence=max,paced=false)`."""
    shown = []
    for parameter in fields_of(rule):
        default = default_of(parameter)
        value = parameter.name.upper() if default is MISSING else as_text(default)
        shown.append(f"{parameter.name}={value}" if parameter.kw_only else value)
    return f"{rule.key}({','.join(shown)})" if shown else rule.key


def _rule_and_arguments(text: str) -> tuple[type[Policy], list[str]]:
    """The class that a policy names, and what stands in its brackets or behind its colon, at each comma."""
    own = re.fullmatch(rf"\s*({_OWN})\s*(?:\((.*)\))?\s*", text, flags=re.DOTALL)
    if own and own_rules(own[1]):
        rule = import_class("policy", own[1])
        if not (isinstance(rule, type) and issubclass(rule, Policy) and hasattr(rule, "key")):
            raise UserError(f"policy {own[1]!r} must be a dataclass derived from unmask.policies.Policy, with a key")
        return rule, _split(own[2] or "", text)
    match = re.fullmatch(r"\s*([a-z0-9-]+)\s*(?::\s*([^:()]+)|\((.*)\))?\s*", text, flags=re.DOTALL)
    if match is None:
        raise UserError(f"cannot read the policy {text!r}: write it as margin, threshold:0.9 or blocks(32,margin)")
    key, single, several = match.groups()
    nearest, known = did_you_mean(key, RULES), ", ".join(RULES)
    require(key in RULES, f"unknown policy {key!r}; {nearest}choose from {known}")
    return RULES[key], [single.strip()] if single is not None else _split(several or "", text)


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
    require(depth == 0, f"cannot read the policy {text!r}: its brackets do not match")
    return [part.strip() for part in parts] if arguments.strip() else []


def _value(text: str, wanted: Any, what: str, network: SelectorNetwork | None, background: Background | None) -> Any:
    """A parameter's text as the type that its field declares."""
    if isinstance(wanted, type) and issubclass(wanted, Policy):
        return parse_policy(text, network, background)
    value: Any = text
    if wanted is bool:
        value = {"true": True, "false": False}.get(text, text)
    elif wanted in (int, float):
        with suppress(ValueError):  # what is no number stays text, which `convert` refuses
            value = wanted(text)
    require(type(value) is not int or abs(value) < 2**31, f"{what} must be below 2^31, got {text!r}")
    return convert(wanted, value, what)
