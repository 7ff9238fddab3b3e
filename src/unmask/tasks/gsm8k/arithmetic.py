"""Exact arithmetic on text: the numbers that stand in it, and the equations `expression=result` of an annotation.

    expression = term (("+" | "-") term)*,    term = factor (("*" | "/" | "//") factor)*,
    factor = ("+" | "-") factor | "(" expression ")" "%"* | number "%"*

with x% = x / 100 and x // y = floor(x / y).  Numbers are integers or fractions, never floats.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from unmask.errors import UserError, require

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
    most = value.denominator.bit_length()
    return next((places for places in range(most) if 10**places % value.denominator == 0), None)


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
        whole, rest = divmod(int(abs(value) * 10**places), 10**places)
        written = f"{whole:,}" if self.commas else str(whole)
        if not whole and places and not self.leading_zero:
            written = ""
        return ("-" if value < 0 else "") + written + (f".{rest:0{places}}" if places else "")


@dataclass(frozen=True)
class Expression:
    """An expression as read: its text around the numbers, and the numbers' places in a postfix program."""

    between: tuple[str, ...]  # the text before, between and after the numbers: one more than numbers
    numbers: tuple[str, ...]  # as written
    program: tuple[int | str, ...]  # postfix: the index of a number, or an operator; "~" is the unary minus

    def values(self, numbers: Sequence[Exact]) -> list[Exact]:
        """The exact value of every operation, that of the whole last; ZeroDivisionError where one has none."""
        stack: list[Exact] = []
        found: list[Exact] = []
        for part in self.program:
            if isinstance(part, int):
                stack.append(numbers[part])
                continue
            right = stack.pop()
            value = _UNARY[part](right) if part in _UNARY else _BINARY[part](stack.pop(), right)
            stack.append(whole_if_whole(value))
            found.append(stack[-1])
        return found or stack

    def roles(self) -> list[str]:
        """For each number the operator that takes it, "//" where it is a divisor, "" where there is none."""
        roles = [""] * len(self.numbers)
        stack: list[int | None] = []  # a number's index, or None for something computed
        for part in self.program:
            if isinstance(part, int):
                stack.append(part)
                continue
            right, left = stack.pop(), None if part in _UNARY else stack.pop()
            if right is not None:
                roles[right] = "//" if part == "/" else part
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
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": divide,
    "//": operator.floordiv,
}


def parse(text: str) -> Expression:
    """The expression that `text` is; UserError with the reason where it is none."""
    between, numbers, tokens = [""], list[str](), list[int | str]()
    for match in _PARTS.finditer(text):
        number, symbol, _, other = match.groups()
        require(other is None, f"{other!r} is no part of an expression")
        if number is not None:
            tokens.append(len(numbers))
            numbers.append(number)
            between.append("")
            continue
        between[-1] += match.group()
        if symbol is not None:
            tokens.append(symbol)
    parser = _Parser(tokens)
    try:
        parser.sum()
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    if parser.left:
        extra = parser.left[-1]
        raise UserError(f"{numbers[extra] if isinstance(extra, int) else extra!r} is one too many")
    return Expression(tuple(between), tuple(numbers), tuple(parser.program))


class _Parser:
    """Recursive descent from `tokens`, numbers (their index) and operators, to a postfix program."""

    def __init__(self, tokens: Sequence[int | str]) -> None:
        self.left = list(reversed(tokens))  # the next one last
        self.program: list[int | str] = []

    def next_is(self, *operators: str) -> bool:
        return bool(self.left) and self.left[-1] in operators

    def take(self) -> int | str:
        require(bool(self.left), "it ends where a number is due")
        return self.left.pop()

    def sum(self) -> None:
        self.chain(self.product, "+", "-")

    def product(self) -> None:
        self.chain(self.factor, "*", "/", "//")

    def chain(self, operand: Callable[[], None], *operators: str) -> None:
        operand()
        while self.next_is(*operators):
            taken = self.take()
            operand()
            self.program.append(taken)

    def factor(self) -> None:
        token = self.take()
        if token in ("+", "-"):
            self.factor()
            self.program += ["~"] if token == "-" else []
            return
        if token == "(":
            self.sum()
            require(self.next_is(")"), "a bracket is not closed")
            self.take()
        else:
            require(isinstance(token, int), f"{token!r} stands where a number is due")
            self.program.append(token)
        while self.next_is("%"):
            self.program.append(self.take())
