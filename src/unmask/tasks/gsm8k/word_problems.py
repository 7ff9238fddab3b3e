"""Word problems as GSM8K has them: reading the files, the two forms of an answer, scoring.

A problem is a question, a solution with calculator annotations `<<48/2=24>>`, and a final `#### number`.

    equations   <<48/2=24>> <<48+24=72>> #### 72        the annotations only, as in GSM8K-Aug
    solution    Natalia sold 48/2 = <<48/2=24>>24 ...   the full text as it stands in the file
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from unmask.errors import UserError, prefixed, require
from unmask.jsonl import parse_json
from unmask.tasks.gsm8k.arithmetic import NUMBER, Exact, Expression, exact, parse

HUB = "openai/gsm8k"
FORMS = ("equations", "solution")
SCORINGS = ("strict", "flexible")

_ANNOTATION = re.compile(r"<<(.*?)>>", flags=re.S)
# A minus sign is one only where no number or bracket stands before it: 5-3 ends with 3.
_SIGNED = rf"(?:(?<![\d)])-)?\$?(?:{NUMBER.pattern})"
_LAST = re.compile(_SIGNED)
_FINAL = re.compile(rf"####\s*({_SIGNED})")


@dataclass(frozen=True)
class Equation:
    """`expression = result` of one annotation; the two sides may differ by a rounding."""

    expression: Expression
    result: str  # as written

    def __str__(self) -> str:
        return f"{self.expression.write(self.expression.numbers)}={self.result}"


@dataclass(frozen=True)
class Problem:
    """A question, and its solution as it stands in the file."""

    question: str
    solution: str

    @cached_property
    def equations(self) -> tuple[Equation, ...]:
        """The annotations; UserError where one does not evaluate."""
        return tuple(_equation(text) for text in _ANNOTATION.findall(self.solution))

    @property
    def final(self) -> str:
        """The number after ####, as written."""
        found = _FINAL.search(self.solution)
        assert found is not None  # readers refuse a problem without it
        return found.group(1)

    def written(self, form: str) -> str:
        """The answer in one of the FORMS."""
        if form == "solution":
            return self.solution
        return equations_text([str(equation) for equation in self.equations], self.final)


def _equation(text: str) -> Equation:
    left, equals, right = text.rpartition("=")
    try:
        require(bool(equals), "it has no '='")
        expression, result = parse(left), right.strip()
        expression.values([exact(number) for number in expression.numbers])
        parse(result)
    except (ValueError, ZeroDivisionError) as error:
        reason = "it divides by zero" if isinstance(error, ZeroDivisionError) else error
        raise UserError(f"the equation <<{_shown(text)}>> does not evaluate: {reason}; mend the line") from None
    return Equation(expression, result)


def equations_text(equations: list[str], final: str) -> str:
    """The `equations` form."""
    return "".join(f"<<{equation}>> " for equation in equations) + f"#### {final.replace(',', '')}"


def answer_in(text: str, scoring: str) -> Exact | None:
    """The number that a text answers: strict, the one after the first ####; flexible, the last one anywhere.

    It is exact (1,000 = 1000 = 1000.0), or None where there is none.
    """
    if scoring == "strict":
        found = _FINAL.search(text)
        number = found.group(1) if found else None
    else:
        number = next(reversed(_LAST.findall(text)), None)
    if number is None:
        return None
    value = exact(number.lstrip("-$"))
    return -value if number.startswith("-") else value


def same_text(question: str) -> str:
    """A key that is equal for questions that differ in case and white space only."""
    return " ".join(question.lower().split())


def without_numbers(question: str) -> str:
    """A key that is equal for questions that differ in their numbers, case and white space only."""
    return same_text(NUMBER.sub("#", question))


def read_problems(source: str, split: str) -> list[Problem]:
    """The problems of the split `train` or `test` from a folder, or from the Hugging Face hub id `openai/gsm8k`.

    A folder has SPLIT.jsonl, each line an object with "question" and "answer", or SPLIT.txt, each line
    `question||steps #### answer` as in GSM8K-Aug.
    """
    path = file_of(source, split)
    return _from_hub(split) if path is None else _from_file(path)


def file_of(source: str, split: str) -> Path | None:
    """The file that a split is read from; None where it is the hub."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        require(source == HUB, f"no folder {source!r}: give one with train.jsonl and test.jsonl, or the hub id {HUB}")
        return None
    for path in (folder / f"{split}.jsonl", folder / f"{split}.txt"):
        if path.is_file():
            return path
    raise UserError(f"{folder} has neither {split}.jsonl nor {split}.txt: put GSM8K's or GSM8K-Aug's files there")


def _from_file(path: Path) -> list[Problem]:
    read = _json_line if path.suffix == ".jsonl" else _text_line
    problems = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                with prefixed(f"{path}, line {number}"):
                    problems.append(_checked(*read(line)))
    require(bool(problems), f"{path} is empty: put GSM8K's or GSM8K-Aug's problems there, one per line")
    return problems


def _json_line(line: str) -> tuple[str, str]:
    expected = 'write {"question": ..., "answer": ...}'
    try:
        row = parse_json(line)
    except UserError:
        raise UserError(f"not JSON; {expected}") from None
    for field in ("question", "answer"):
        is_text = isinstance(row, dict) and isinstance(row.get(field), str)
        require(is_text, f'no text under "{field}"; {expected}')
    return row["question"], row["answer"]


def _text_line(line: str) -> tuple[str, str]:
    question, bars, answer = line.partition("||")
    require(bool(bars), "no '||'; write question||steps #### answer")
    return question, answer


def _checked(question: str, solution: str) -> Problem:
    require(bool(question.strip()), "the question is empty")
    require(_FINAL.search(solution) is not None, "the answer has no '#### number' at its end")
    problem = Problem(question.strip(), solution.strip())
    _ = problem.equations  # they are checked now, not when they are needed
    return problem


def _from_hub(split: str) -> list[Problem]:
    instead = "pass a folder with train.jsonl and test.jsonl instead (--set task.folder=FOLDER)"
    try:
        import datasets
    except ImportError:
        raise UserError(f"{HUB} needs the package datasets: pip install datasets, or {instead}") from None
    attempts = logging.getLogger("huggingface_hub")  # which logs every one of them
    level = attempts.level
    attempts.setLevel(logging.ERROR)
    try:
        rows = datasets.load_dataset(HUB, "main", split=split)
    except Exception as error:  # of the network, the hub or the cache
        raise UserError(f"{HUB} cannot be loaded ({_shown(str(error))}): {instead}") from None
    finally:
        attempts.setLevel(level)
    problems = []
    for number, row in enumerate(rows, start=1):
        with prefixed(f"{HUB}, {split}, row {number}"):
            problems.append(_checked(row["question"], row["answer"]))
    return problems


def _shown(text: str) -> str:
    """At most 80 characters on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:79] + "…"
