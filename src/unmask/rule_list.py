"""The unmasking rules as `unmask policies` lists them, read from their sources: importing those would import torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_FOLDER = Path(__file__).parent / "decoding" / "policies"


def listed_rules() -> list[tuple[str, str, str, str]]:
    """Each rule: how it is written (`names.usage`), its class, and from its docstring a sentence for people who do not
    know its name (the first paragraph) and its formula (the second), a line each."""
    modules = re.findall(r"^from \S+\.(\w+) import \*", _source("__init__"), flags=re.MULTILINE)
    nodes = [node for module in modules for node in ast.parse(_source(module)).body if isinstance(node, ast.ClassDef)]
    keys = {
        node.name: ast.literal_eval(line.value)
        for node in nodes
        for line in node.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "key"
    }
    return [
        (_usage(node, keys), node.name, words, formula)
        for node in nodes
        if node.name in keys
        for words, formula in [(ast.get_docstring(node) or "").split("\n\n")[:2]]
    ]


def in_words() -> dict[str, str]:
    """What each rule does, by its key."""
    return {usage.partition("(")[0]: words for usage, _, words, _ in listed_rules()}


def _source(module: str) -> str:
    return (_FOLDER / f"{module}.py").read_text(encoding="utf-8")


def _usage(rule: ast.ClassDef, keys: dict[str, str]) -> str:
    shown, keyword_only = [], False
    for field in (node for node in rule.body if isinstance(node, ast.AnnAssign)):
        name = ast.unparse(field.target)
        keyword_only = keyword_only or ast.unparse(field.annotation) == "KW_ONLY"
        if name == "_" or "repr=False" in ast.unparse(field):  # the mark itself, and what no text can give
            continue
        value = _default(field.value, keys) if field.value else name.upper()
        shown.append(f"{name}={value}" if keyword_only else value)
    return f"{keys[rule.name]}({','.join(shown)})" if shown else keys[rule.name]


def _default(value: ast.expr, keys: dict[str, str]) -> str:
    if isinstance(value, ast.Call):  # field(default_factory=TopProbability)
        return keys[ast.unparse(value.keywords[0].value)]
    constant = ast.literal_eval(value)
    return f"{constant:g}" if isinstance(constant, float) else str(constant).lower()
