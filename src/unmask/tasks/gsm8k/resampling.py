"""New numbers for a word problem: every operand is traced to its source, then everything is recomputed.

An operand of an equation comes from a number of the question, from the result of an earlier equation, or it is a
constant of the world (half -> 2, minutes -> 60).  Where its value has exactly one source, that is the trace.  Numbers
of the question with the same value stay equal to each other, so that it does not matter which of them is meant.
Whatever else is ambiguous is frozen, that is, it keeps its numbers:

- an operand with two sources (a number and a result, two results, a number and a word such as `twice`) freezes them
  all, and a result is frozen by freezing every number that it was computed from;
- a constant that is a simple function of a number of the question (0.5 for 50%, 80 for 20% off) freezes that number,
  and so does one that a result or two numbers give and no word of the question explains;
- a number of terms that their sum is divided by;
- 0, 1, years, times, ordinals, fractions, percents that add up to 100, and numbers that no equation uses.

A problem with a constant that nothing explains is left as it is.  One whose answer depends on a number that is not
frozen is a template.  A whole number v is redrawn from about [v/2, 2v], and so is a decimal, with as many decimals;
round numbers stay round and percents below 100.  A draw is kept if it is sane:

    every result whole where it was whole, with no more decimals than it had, positive where it was positive and
    below 1 where it was a fraction of 1; nothing on the way negative, no division by zero.

All arithmetic is exact.  Only the `equations` form can be written with new numbers: in a full solution the numbers
stand in sentences too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from unmask.rng import Purpose, uniforms
from unmask.tasks.gsm8k.arithmetic import NUMBER, Exact, Expression, Style, decimals_of, divide, exact
from unmask.tasks.gsm8k.word_problems import Problem, answer_in, equations_text

# Words that may be where a constant comes from, by its value.
_WORDS: dict[Exact, str] = {
    2: "two|twice|half|halve[sd]?|halfway|double[sd]?|pairs?|couple|both|second|twins?|each other|average|two-thirds",
    3: "three|thrice|triple[sd]?|thirds?|triplets|yards?",
    4: "four|quarters?|quadruple[sd]?|fourths?|fourth|square|months?",
    5: "five|fifths?|fifth|nickels?|weekdays?",
    6: "six|sixths?|sixth",
    7: "seven|weeks?|weekly|daily|every day|a day|per day|each day|sevenths?",
    8: "eight|eighths?|pints?|gallons?",
    9: "nine|ninths?",
    10: "ten|dimes?|tenths?|decades?",
    11: "eleven",
    12: "twelve|dozens?|years?|yearly|annual(?:ly)?|months?|monthly|foot|feet|inch|inches",
    13: "thirteen",
    14: "fourteen|fortnight|weeks?",
    15: "fifteen|quarters?",
    16: "sixteen|ounces?|pounds?",
    18: "eighteen",
    20: "twenty|score",
    24: "hours?|days?|daily",
    25: "quarters?|cents?",
    30: "thirty|months?|monthly|half|days?",
    31: "months?|january|march|may|july|august|october|december",
    36: "yards?|inch|inches",
    40: "forty",
    50: "fifty|half",
    52: "years?|yearly|annual(?:ly)?|weeks?|weekly",
    60: "sixty|minutes?|hours?|seconds?",
    100: "hundreds?|percent|percentage|cents?|dollars?|centuries|century|meters?|centimeters?",
    365: "years?|yearly|annual(?:ly)?|days?|daily",
    1000: "thousands?|kilo\\w*|km|kg|liters?|milliliters?|ml|grams?|tons?",
    Fraction(1, 2): "half|halves|halved|halfway",
    Fraction(1, 4): "quarters?|fourths?",
    Fraction(3, 4): "quarters|fourths",
    Fraction(3, 2): "half",
}
_WORD_PATTERNS = {
    value: re.compile(rf"(?<!\w)(?:{words})(?!\w)" + ("|[%$¢]" if value == 100 else ""), flags=re.I)
    for value, words in _WORDS.items()
}

# A term of a sum or difference is counted in the question, in digits or in these words; no unit explains it.
_COUNT_WORDS = (
    "zero|none", "an?|one|once|single|another|first", "two|twice|couple|pair|both|twins", "three", "four", "five",
    "six", "seven", "eight", "nine", "ten", "eleven", "twelve|dozen", "thirteen", "fourteen", "fifteen", "sixteen",
    "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_COUNTS: dict[Exact, re.Pattern[str]] = {
    value: re.compile(rf"(?<!\w)(?:{word})(?!\w)", flags=re.I) for value, word in enumerate(_COUNT_WORDS)
}

_ORDINAL_OR_TIME = re.compile(r"(?:st|nd|rd|th)\b|\s?[ap]\.?m\b|:\d|/\d|°", flags=re.I)
_PERCENT = re.compile(r"\s?%|[\s-]percent", flags=re.I)


class Number(NamedTuple):
    """A number of a question."""

    start: int
    end: int
    value: Exact
    style: Style
    percent: bool
    fixed: bool  # by its form: it can be a source, but is never redrawn


class Traced(NamedTuple):
    """An equation whose operands are traced.  A source i >= 0 is number i of the question, -1 - j the result of
    equation j, None a constant."""

    expression: Expression
    sources: tuple[int | None, ...]
    constants: tuple[Exact, ...]  # the operands' original values
    styles: tuple[Style, ...]
    result: Exact
    result_style: Style


@dataclass(frozen=True)
class Template:
    """A problem whose numbers can be redrawn."""

    question: str
    numbers: tuple[Number, ...]
    free: tuple[tuple[int, ...], ...]  # the numbers that are drawn: those of a tuple are equal to each other
    equations: tuple[Traced, ...]
    answer: int  # the equation whose result is the answer
    answer_style: Style

    def write(self, values: Sequence[Exact]) -> tuple[str, str] | None:
        """The question and its `equations` answer with these values of all numbers; None where it is not sane."""
        evaluated = self._evaluated(values)
        if evaluated is None:
            return None
        question, at = "", 0
        for number, value in zip(self.numbers, values, strict=True):
            same = value == number.value
            written = self.question[number.start : number.end] if same else number.style.write(value)
            question += self.question[at : number.start] + written
            at = number.end
        equations = []
        for equation, (operands, result) in zip(self.equations, evaluated, strict=True):
            left = equation.expression.write(list(map(Style.write, equation.styles, operands)))
            equations.append(f"{left}={equation.result_style.write(result)}")
        final = self.answer_style.write(evaluated[self.answer][1])
        return question + self.question[at:], equations_text(equations, final)

    def _evaluated(self, values: Sequence[Exact]) -> list[tuple[list[Exact], Exact]] | None:
        """The operands and the result of every equation, or None where one is not sane."""
        found: list[tuple[list[Exact], Exact]] = []
        for equation in self.equations:
            operands = [
                constant if source is None else values[source] if source >= 0 else found[-1 - source][1]
                for source, constant in zip(equation.sources, equation.constants, strict=True)
            ]
            try:
                steps = equation.expression.values(operands)
            except ZeroDivisionError:
                return None
            result, before = steps[-1], equation.result
            if any(step < 0 for step in steps) or (result == 0) != (before == 0) or (before < 1) != (result < 1):
                return None
            if not isinstance(result, int):
                decimals = decimals_of(result)
                if decimals is None or decimals > (decimals_of(before) or 0):
                    return None
            found.append((operands, result))
        return found

    def draws(self, seed: int, name: int, attempts: int) -> Iterator[tuple[str, str]]:
        """Sane problems with new numbers, each a pure function of (seed, name, attempt); they may repeat."""
        original = [number.value for number in self.numbers]
        choices = [_choices([self.numbers[i] for i in equal]) for equal in self.free]
        for first in range(0, attempts, _AT_ONCE):
            attempt = torch.arange(first, min(first + _AT_ONCE, attempts))[:, None]
            words = (_RESAMPLING, name, attempt, torch.arange(len(self.free)))
            for row in uniforms(seed, Purpose.DATA, *words, dtype=torch.float64).tolist():
                values = list(original)
                for equal, u, (low, count, step, scale) in zip(self.free, row, choices, strict=True):
                    value = divide((low + int(u * count)) * step, scale)
                    for i in equal:
                        values[i] = value
                if (written := self.write(values)) is not None:
                    yield written


_AT_ONCE = 128  # attempts per call of `uniforms`
_RESAMPLING = 3  # the word after DATA; 0, 1 and 2 are those of the puzzles


def _choices(equal: Sequence[Number]) -> tuple[int, int, int, int]:
    """(low, count, step, scale): the new values of equal numbers are (low + k) * step / scale for k below count.

    In units of the last decimal the value is n; the step is the largest power of ten that divides n and leaves at
    least ten steps below n (2000 -> 100, 120 -> 10, 48 -> 1), or 5 for percents that are multiples of 5.
    """
    scale = 10 ** min(number.style.decimals for number in equal)
    n = int(equal[0].value * scale)
    step = 1
    while n % (10 * step) == 0 and n >= 100 * step:
        step *= 10
    low, high = max(-(-n // 2), 2 if scale == 1 else 1), max(2 * n, n + 4)
    if any(number.percent for number in equal) and n < 100 * scale:
        step = 5 if scale == 1 and n % 5 == 0 else step
        high = min(high, 100 * scale - 1)
    first, last = -(-low // step), high // step
    return first, last - first + 1, step, scale


def find_numbers(question: str) -> tuple[Number, ...]:
    """The numbers of a question, from left to right."""
    found = []
    for match in NUMBER.finditer(question):
        start, end = match.span()
        value, after = exact(match.group()), question[end : end + 12]
        percent = _PERCENT.match(after) is not None
        year = 1900 <= value <= 2100 and "," not in match.group() and question[start - 1 : start] != "$"
        sign = re.search(r"(?:^|[\s(])-$", question[:start]) is not None
        part = re.search(r"[A-Za-z_]$|\d[/:.]$", question[:start]) is not None
        fixed = value in (0, 1) or year or sign or part or _ORDINAL_OR_TIME.match(after) is not None
        found.append(Number(start, end, value, Style.of(match.group()), percent, fixed))
    percents = [i for i, number in enumerate(found) if number.percent]
    if len(percents) > 1 and sum(found[i].value for i in percents) == 100:
        for i in percents:
            found[i] = found[i]._replace(fixed=True)
    return tuple(found)


def template_of(problem: Problem) -> Template | None:
    """The template that a problem makes, or None where none of its numbers can be redrawn."""
    if not problem.equations:
        return None
    trace = _Trace(problem.question)
    if not all(trace.add(equation.expression, equation.result) for equation in problem.equations) or trace.lost:
        return None
    final = answer_in(problem.solution, "strict")
    answers = [j for j, equation in enumerate(trace.equations) if equation.result == final]
    trace.freeze_numbers_of_terms()
    used = {source for equation in trace.equations for source in equation.sources if source is not None}
    free = tuple(
        equal
        for equal in trace.equals.values()
        if equal[0] in used and not any(i in trace.frozen or trace.numbers[i].fixed for i in equal)
    )
    if not answers or not any(equal[0] in trace.comes_from[answers[-1]] for equal in free):
        return None
    style = Style.of(problem.final.removeprefix("$").replace(",", ""))
    found = Template(problem.question, trace.numbers, free, tuple(trace.equations), answers[-1], style)
    back = found.write([number.value for number in found.numbers])
    return found if back == (problem.question, problem.written("equations")) else None


class _Trace:
    """The equations so far, and what is frozen."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.numbers = find_numbers(question)
        self.equals: dict[Exact, tuple[int, ...]] = {}  # the numbers of each value; the first stands for all
        for i, number in enumerate(self.numbers):
            self.equals[number.value] = (*self.equals.get(number.value, ()), i)
        self.frozen: set[int] = set()  # numbers of the question
        self.lost = False  # whether a constant came from nowhere
        self.equations: list[Traced] = []
        self.meaning: list[str] = []  # of each result, as a formula of its sources: equal ones are one source
        self.comes_from: list[set[int]] = []  # of each result, the numbers of the question that it depends on

    def add(self, expression: Expression, result: str) -> bool:
        """Trace one equation; False where it cannot be recomputed."""
        operands = tuple(exact(number) for number in expression.numbers)
        styles = tuple(Style.of(number) for number in expression.numbers)
        if not NUMBER.fullmatch(result) or expression.values(operands)[-1] != exact(result):
            return False  # a negative or a rounded result
        roles = expression.roles()
        sources = tuple(self._source(value, role) for value, role in zip(operands, roles, strict=True))
        if roles == [""] and sources == (None,):
            return False  # 30=30, computed without an annotation
        depends: set[int] = set()
        for source in sources:
            if source is not None:
                depends |= {source} if source >= 0 else self.comes_from[-1 - source]
        self.meaning.append(expression.write([self._meaning(s, v) for s, v in zip(sources, operands, strict=True)]))
        self.comes_from.append(depends)
        self.equations.append(Traced(expression, sources, operands, styles, exact(result), Style.of(result)))
        return True

    def freeze_numbers_of_terms(self) -> None:
        """Freeze a number that a sum is divided by where the sum has as many terms: an average of `those 3 months`."""
        terms = {equation.expression.program.count("+") + 1 for equation in self.equations}
        for equation in self.equations:
            for source, role in zip(equation.sources, equation.expression.roles(), strict=True):
                if role == "//" and source is not None and source >= 0 and self.numbers[source].value in terms - {1}:
                    self.frozen.add(source)

    def _meaning(self, source: int | None, value: Exact) -> str:
        if source is None:
            return str(value)
        return f"q{source}" if source >= 0 else f"({self.meaning[-1 - source]})"

    def _source(self, value: Exact, role: str) -> int | None:
        """Where an operand of this value comes from, with whatever is ambiguous about it frozen."""
        numbers = self.equals.get(value, ())[:1]  # the first stands for all
        backwards = reversed(range(len(self.equations)))  # so that the first of equal meaning stands for all
        results = {self.meaning[j]: j for j in backwards if self.equations[j].result == value}
        spoken = self._spoken(_WORD_PATTERNS, value)
        if numbers:
            results.pop(f"q{numbers[0]}", None)  # an equation such as 4=4 only repeats the number
        if not numbers and not results:
            if role in ("+", "-"):
                spoken = self._spoken(_COUNTS, value)
            spoken = spoken or value == 1 or (value == 2 and role not in ("+", "-"))
            known = spoken or (value <= 12 and role not in ("+", "-"))  # the sides of a square, the legs of a spider
            self.lost |= not (self._freeze_for_constant(value, spoken) or known)
            return None
        if len(numbers) + len(results) == 1 and not (numbers and spoken):
            return numbers[0] if numbers else -1 - next(iter(results.values()))
        self.frozen.update(numbers)
        for j in results.values():
            self.frozen |= self.comes_from[j]
        return None

    def _spoken(self, patterns: Mapping[Exact, re.Pattern[str]], value: Exact) -> bool:
        """Whether a word of the question stands for the value."""
        return value in patterns and patterns[value].search(self.question) is not None

    def _freeze_for_constant(self, value: Exact, spoken: bool) -> bool:
        """Freeze the numbers that a constant may have been computed from without an annotation.

        A percent comes first, and a word of the question second; where neither explains the constant, every number,
        every earlier result and every pair of numbers that gives it is frozen.  Returns whether there is any.
        """
        numbers = [(i, Fraction(number.value)) for i, number in enumerate(self.numbers) if number.value]
        of_percent = [(i, x) for i, x in numbers if self.numbers[i].percent]
        percents = {i for i, x in of_percent if value in (x / 100, 1 - x / 100, 1 + x / 100, 100 - x, 100 + x)}
        self.frozen |= percents
        if percents or spoken:
            return bool(percents)
        found = False
        results = [(self.comes_from[j], Fraction(equation.result)) for j, equation in enumerate(self.equations)]
        for known, x in [({i}, x) for i, x in numbers] + [(known, x) for known, x in results if x]:
            shifted = (x - 1, x + 1, 100 - x, 100 + x, 1 - x / 100, 1 + x / 100, 1 + x / 60, x + Fraction(1, 2), 1 / x)
            if value in (*shifted, x * x) or any(value in (x * k, x / k) for k in (2, 7, 10, 12, 60, 100, 1000)):
                self.frozen |= known
                found = True
        for (i, x), (k, y) in itertools.combinations(numbers, 2):
            if value in (x + y, x - y, y - x, x * y, x / y, y / x):
                self.frozen |= {i, k}
                found = True
        return found
