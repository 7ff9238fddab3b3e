"""FCD of true molecules: against the first 10,000 of the file, as in the records up to now, and against random ones."""

import json

import numpy as np
import torch

from unmask.tasks.molecules.chemistry import canonical, described, frechet_distance
from unmask.tasks.molecules.molecules import Molecules

NUMBERS = (113, 183, 231, 282, 342, 349, 376, 513, 735, 752, 771, 799, 953, 3000)

task = Molecules(fcd=10_000)
task.vocabulary  # reads the files
in_file = np.sort(task._rows("test"))
order = np.random.default_rng(0).permutation(np.arange(10_000, len(in_file)))


def molecules(rows):
    tokens = torch.from_numpy(task._tokens[1]["test"].first(rows, task.length, task.eos_token_id))
    return [found for found in canonical(task.codes(tokens, None)) if found]


head, random = described(molecules(in_file[:10_000])), described(molecules(in_file[order[:10_000]]))
print(json.dumps({"molecules": 10_000, "to the head of the file": round(frechet_distance(random, head), 2)}), flush=True)
for count in NUMBERS:
    far = [described(molecules(in_file[order[start : start + count]])) for start in (10_000, 20_000, 30_000)]
    values = {
        name: round(float(np.mean([frechet_distance(some, reference) for some in far])), 2)
        for name, reference in (("to the head of the file", head), ("to random ones", random))
    }
    print(json.dumps({"molecules": count, **values}), flush=True)
