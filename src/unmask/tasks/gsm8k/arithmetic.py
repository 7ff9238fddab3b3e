"""Exact arithmetic on text: the numbers that stand in it, and the equations `expression=result` of an annotation.

    expression = term (("+" | "-") term)*,    term = factor (("*" | "/" | "//") factor)*,
    factor = ("+" | "-") factor | "(" expression ")" "%"* | number "%"*

with x% = x / 100 and x // y = floor(x / y).

Numbers are Python integers or fractions.Fraction, never floats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from unmask.errors import UserError

NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.\d+|\d+")  # 1,234.50  .5  72
_PARTS = re.compile(rf"({NUMBER.pattern})|(//|[-+*/()%])|(\s+)|(.)", flags=re.S)

Exact = int | Fraction


def exact(text: str) -> Exact:
    """The value of a number as NUMBER finds it: 1,000 = 1000 = 1000.0."""
    return whole_if_whole(Fraction(text.replace(",", "")))


def whole_if_whole(value: Exact) -> Exact:
    """An integer where it is one: integers are much faster than fractions."""
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value


def decimals_of(value: Exact) -> int | None:
    """How many decimals it takes to write `value`; None where no number of them is enough."""
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None


@dataclass(frozen=True)
class Style:
    """How a number is written, so that another value can be written the same way."""

    decimals: int = 0
    padded: bool = False  # 2.50: always as many decimals; 2.5: no more than it takes
    leading_zero: bool = True  # 0.5, not .5
    commas: bool = False  # 1,000

    @classmethod
    def of(cls, text: str) -> Style:
        whole, _, fraction = text.partition(".")
        return cls(len(fraction), fraction.endswith("0"), whole != "", "," in whole)

    def write(self, value: Exact) -> str:
        """`value`, which must have a finite number of decimals, with more of them than usual where it takes more."""
        needed = decimals_of(value)
        assert needed is not None
        places = max(needed, self.decimals) if self.padded else needed
        digits = str(abs(value * 10**places)).rjust(places + 1, "0")
        whole, fraction = digits[: len(digits) - places], digits[len(digits) - places :]
        if whole == "0" and fraction and not self.leading_zero:
            whole = ""
        if self.commas and whole:
            whole = f"{int(whole):,}"
        return ("-" if value < 0 else "") + whole + ("." + fraction if fraction else "")


@dataclass(frozen=True)
class Expression:
    """An expression as read: its text around the numbers, and the numbers' places in a postfix program."""

    between: tuple[str, ...]  # the text before, between and after the numbers: one more than numbers
    numbers: tuple[str, ...]  # as written
    program: tuple[int | str, ...]  # postfix: the index of a number, or an operator; "~" is the unary minus

    def value(self, numbers: Sequence[Exact]) -> Exact:
        """The exact value with these numbers; ZeroDivisionError where it has none."""
        return self.values(numbers)[-1]

    def values(self, numbers: Sequence[Exact]) -> list[Exact]:
        """What every operation on the way gives, the value of the whole last."""
        stack: list[Exact] = []
        found: list[Exact] = []
        for part in self.program:
            if isinstance(part, int):
                stack.append(numbers[part])
                continue
            if part in "~%":
                value = _UNARY[part](stack.pop())
            else:
                right, left = stack.pop(), stack.pop()
                value = _BINARY[part](left, right)
            value = whole_if_whole(value)
            stack.append(value)
            found.append(value)
        return found or stack

    def roles(self) -> list[str]:
        """For each number the operator that takes it, "//" where it is a divisor, "" where there is none."""
        roles = [""] * len(self.numbers)
        stack: list[int | None] = []  # a number's index, or None for something computed
        for part in self.program:
            if isinstance(part, int):
                stack.append(part)
                continue
            right = stack.pop()
            if right is not None:
                roles[right] = "//" if part == "/" else part
            if part not in "~%":
                left = stack.pop()
                if left is not None:
                    roles[left] = part
            stack.append(None)
        return roles

    def write(self, numbers: Sequence[str]) -> str:
        """The text with other numbers."""
        return "".join(part for pair in zip(self.between, (*numbers, ""), strict=True) for part in pair)


def divide(left: Exact, right: Exact) -> Exact:
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return Fraction(left) / right


_UNARY: dict[str, Callable[[Exact], Exact]] = {"~": lambda x: -x, "%": lambda x: divide(x, 100)}
_BINARY: dict[str, Callable[[Exact, Exact], Exact]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": divide,
    "//": lambda x, y: x // y,
}


def parse(text: str) -> Expression:
    """The expression that `text` is; UserError with the reason where it is none."""
    try:
        return _Parser(text).expression
    except RecursionError:
        raise UserError("it is nested too deeply") from None


class _Parser:
    """Recursive descent; `tokens` are numbers (their index) and operators, without the white space."""

    def __init__(self, text: str) -> None:
        between: list[str] = [""]
        numbers: list[str] = []
        tokens: list[int | str] = []
        for match in _PARTS.finditer(text):
            number, operator, _, other = match.groups()
            if other is not None:
                raise UserError(f"{other!r} is no part of an expression")
            if number is not None:
                tokens.append(len(numbers))
                numbers.append(number)
                between.append("")
                continue
            between[-1] += match.group()
            if operator is not None:
                tokens.append(operator)
        self.tokens = tokens
        self.at = 0
        self.program: list[int | str] = []
        self.sum()
        if self.at < len(tokens):
            extra = tokens[self.at]
            raise UserError(f"{numbers[extra] if isinstance(extra, int) else extra!r} is one too many")
        self.expression = Expression(tuple(between), tuple(numbers), tuple(self.program))

    def next_is(self, *operators: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at] in operators

    def take(self) -> int | str:
        if self.at == len(self.tokens):
            raise UserError("it ends where a number is due")
        self.at += 1
        return self.tokens[self.at - 1]

    def sum(self) -> None:
        self.product()
        while self.next_is("+", "-"):
            operator = self.take()
            self.product()
            self.program.append(operator)

    def product(self) -> None:
        self.factor()
        while self.next_is("*", "/", "//"):
            operator = self.take()
            self.factor()
            self.program.append(operator)

    def factor(self) -> None:
        token = self.take()
        if token in ("+", "-"):
            self.factor()
            if token == "-":
                self.program.append("~")
            return
        if token == "(":
            self.sum()
            if not self.next_is(")"):
                raise UserError("a bracket is not closed")
            self.take()
        elif isinstance(token, int):
            self.program.append(token)
        else:
            raise UserError(f"{token!r} stands where a number is due")
        while self.next_is("%"):
            self.program.append(self.take())
