"""How a causal language model reads the samples of a run, and how varied their tokens are.

y_i: the tokens of response i, and of the text behind it where a span was written; |y_i| of them are predicted
c_i: what they are predicted from, the model's beginning of text, if it has one, and the prompt

perplexity       exp(- sum_i sum_j log p(y_ij | c_i, y_i1 ... y_i(j-1)) / sum_i |y_i|)
token entropy    mean over the responses i of - sum_v f_iv log f_iv, in nats, f_iv the share of the token v
distinct n       different n-grams of the responses / all their n-grams, n = 1, 2, 3

The samples are decoded to text, and split again by the causal model's own tokenizer: prompt, response and the text
behind it each by itself.  Where c_i is empty, the first token is not predicted.  What is beyond the context of the
model is cut off.  Texts that repeat themselves have a low perplexity too: entropy and distinct n-grams show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from unmask.display import say
from unmask.errors import require
from unmask.evaluation.records import Record
from unmask.evaluation.verdicts import VerdictFile
from unmask.jsonl import append_jsonl, read_jsonl
from unmask.models.importers.pretrained import Causal, load_causal
from unmask.progress import progress
from unmask.runtime import Processes
from unmask.tasks import diversity
from unmask.tasks.task import Task, around
from unmask.training.run import load_task

TOKENS = 4096  # per pass, with padding: their logits are [4096, V]
FILE = "perplexity.jsonl"
HELD_OUT = "held-out"  # the key of the true responses


@dataclass(frozen=True)
class Perplexity:
    """What a causal model says of the samples of a record: a line of RUN/perplexity.jsonl."""

    key: str  # of the record, or HELD_OUT
    causal: str  # the name of the model's folder
    perplexity: float | None  # None: there is no token to predict
    tokens: int  # that were predicted
    token_entropy: float
    distinct: list[float]  # of n-grams, n = 1, 2, 3


class Reader(NamedTuple):
    name: str  # of the causal model
    causal: Causal
    task: Task


def load_reader(run: Path, folder: str, split: str | None, trust_task: bool, cpu: bool) -> Reader:
    """The causal model and the task of a run; whatever is wrong is found before anything is generated."""
    _, task = load_task(run, trust_task)
    task = task.on_split(split) if split else task
    first = task.examples(torch.arange(1), "test")
    kept = [] if task.unconditional else task.codes(first.tokens, first) or []
    reads = f"--perplexity reads texts, and task {task.name} keeps none of its samples: it is for task text"
    require(bool(kept) and isinstance(kept[0], str), reads)
    causal = load_causal(folder)
    model: Any = causal.model
    rows, tokens = model.get_input_embeddings().num_embeddings, causal.tokenizer.get_vocab_size()
    require(tokens <= rows, f"{folder}: the tokenizer has {tokens} tokens, the model {rows}: they must be of one model")
    model = model.to(Processes(cpu).device).eval()
    require(_is_causal(model), f"{folder} reads the tokens that it predicts: give a causal language model")
    return Reader(Path(folder).resolve().name, Causal(model, causal.tokenizer), task)


def evaluate_run_perplexity(run: Path, records: Sequence[Record], reader: Reader) -> list[Perplexity]:
    """The samples of these records, as RUN/verdicts.jsonl has them, and the true responses; adds to the run's file."""
    verdicts, texts = VerdictFile(run / "verdicts.jsonl", writes=False), dict[str, list[str]]()
    for record in records:
        chunks = verdicts.chunks(record.key, record.outcome.device, record.outcome.compile)
        if answers := [answer for chunk in chunks for answer in chunk.answers or []]:
            texts[record.key] = answers
    require(bool(texts), f"{run} was evaluated when its samples were not kept: evaluate it again, with --again")
    found = evaluate_perplexity(reader, texts)
    append_jsonl(run / FILE, found)
    return found


def read_perplexities(run: Path) -> list[Perplexity]:
    """What `unmask evaluate --perplexity` wrote; of several lines of a record and a causal model, the last."""
    lines = read_jsonl(run / FILE, Perplexity) if (run / FILE).exists() else []
    return list({(line.key, line.causal): line for line in lines}.values())


def evaluate_perplexity(reader: Reader, texts: Mapping[str, Sequence[str]]) -> list[Perplexity]:
    """texts: by their key, the responses to the first held-out examples; the true ones come first."""
    name, (model, tokenizer), task = reader

    def split(parts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(parts), add_special_tokens=False)]

    count, start = max(map(len, texts.values())), model.config.bos_token_id
    examples = task.examples(torch.arange(count), "test")
    before, behind = map(split, zip(*(around(task, examples, row) for row in range(count)), strict=True))
    contexts = [([] if start is None else [start]) + tokens for tokens in before]
    found, every = [], {HELD_OUT: task.codes(examples.tokens, examples) or [], **texts}
    cut, num_texts = 0, sum(map(len, every.values()))
    with progress("perplexity", num_texts) as advance:
        for key, responses in every.items():
            written, total, predicted = split(responses), 0.0, 0
            pairs = [(c, y + z if y else []) for c, y, z in zip(contexts, written, behind, strict=False)]
            cut += sum(len(c) + len(y) > (_context(model) or math.inf) for c, y in pairs)
            for part in _log_likelihoods(model, pairs):
                total, predicted = total + part[0], predicted + part[1]
                advance(part[2])
            perplexity = math.exp(-total / predicted) if predicted else None
            distinct = [diversity.distinct(written, n) for n in (1, 2, 3)]
            found.append(Perplexity(key, name, perplexity, predicted, fmean(map(diversity.entropy, written)), distinct))
    if cut:
        say(f"unmask: {cut} of {num_texts} texts are cut to the context of {name}, {_context(model)} tokens", err=True)
    return found


@torch.no_grad()
def _log_likelihoods(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[tuple[float, int, int]]:
    """Of each batch of (c, y): sum of log p(y | c), the number of tokens predicted, the number of texts."""
    room, device = _context(model), model.device
    ordered = sorted(((len(c), [*c, *y][:room]) for c, y in pairs), key=lambda pair: len(pair[1]))  # little padding
    size = max(1, TOKENS // max(2, len(ordered[-1][1])))
    for first in range(0, len(ordered), size):
        batch = ordered[first : first + size]
        tokens = pad_sequence([torch.tensor(text, dtype=torch.long) for _, text in batch], batch_first=True)  # [B, L]
        if tokens.shape[1] < 2:
            yield 0.0, 0, len(batch)
            continue
        place, given = torch.arange(tokens.shape[1]), torch.tensor([c for c, _ in batch])[:, None]
        real = place < torch.tensor([len(text) for _, text in batch])[:, None]
        counted = (real & (place >= given))[:, 1:].to(device)  # [B, L - 1]
        tokens = tokens.to(device)
        logits = model(input_ids=tokens, attention_mask=real.long().to(device)).logits  # [B, L, V]
        # Place j is predicted from j - 1.
        log_p = -cross_entropy(logits[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none")
        yield float(log_p[counted].double().sum()), int(counted.sum()), len(batch)


def _is_causal(model: Any) -> bool:
    """Whether another last token leaves what is predicted before it as it is."""
    pair = torch.tensor([[0, 0, 0], [0, 0, 1]], device=model.device)
    with torch.inference_mode():
        logits = model(pair).logits[:, :2].float()
    return bool(torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-3))


def _context(model: Any) -> int | None:
    """The most tokens that the model reads; None: any number."""
    found: int | None = getattr(model.config, "max_position_embeddings", None)
    return found
