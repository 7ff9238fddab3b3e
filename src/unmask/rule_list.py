"""The unmasking rules as `unmask policies` lists them, read from their sources: importing those would import torch."""

from __future__ import annotations

import ast
from pathlib import Path

_FOLDER = Path(__file__).parent / "decoding" / "policies"


def listed_rules() -> list[tuple[str, str]]:
    """Each of `names.RULES`: how it is written (`names.usage`), and the first paragraph of its docstring as a line."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in _FOLDER.glob("*.py")}
    classes = {node.name: node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)}
    (listed,) = (node for node in trees["names"].body if ast.unparse(node).startswith("_CLASSES"))
    names = [node.id for node in ast.walk(listed) if isinstance(node, ast.Name)]
    return [
        (_usage(classes[name], classes), " ".join((ast.get_docstring(classes[name]) or "").split("\n\n")[0].split()))
        for name in names
        if name in classes and name != "Policy"
    ]


def _usage(rule: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> str:
    shown, keyword_only = [], False
    for field in (node for node in rule.body if isinstance(node, ast.AnnAssign)):
        name = ast.unparse(field.target)
        keyword_only = keyword_only or ast.unparse(field.annotation) == "KW_ONLY"
        if name == "_" or ast.unparse(field).endswith("field(repr=False)"):  # the mark itself, and the network
            continue
        value = _default(field.value, classes) if field.value else name.upper()
        shown.append(f"{name}={value}" if keyword_only else value)
    return f"{_key(rule)}({','.join(shown)})" if shown else _key(rule)


def _default(value: ast.expr, classes: dict[str, ast.ClassDef]) -> str:
    if isinstance(value, ast.Call):  # field(default_factory=TopProbability)
        return _key(classes[ast.unparse(value.keywords[0].value)])
    constant = ast.literal_eval(value)
    return f"{constant:g}" if isinstance(constant, float) else str(constant).lower()


def _key(rule: ast.ClassDef) -> str:
    (key,) = (node for node in rule.body if ast.unparse(node).startswith("key = "))
    assert isinstance(key, ast.Assign)
    return str(ast.literal_eval(key.value))
