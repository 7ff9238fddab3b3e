"""The Hugging Face hub: a model's folder from it, and onto it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import unmask
from unmask.errors import UserError

HOME = "https://github.com/unmask-project/unmask"
FILES = ["config.json", "model.safetensors", "tokenizer.json", "manifest.json", "recipe.json", "results.jsonl"]
CARD = """\
---
library_name: unmask
tags:
- masked-diffusion
- generation-order
---

# {name}

{what}, of [unmask]({home}) {version}.

## Load it

```python
import torch
import unmask

model = unmask.OrderModel.from_pretrained("{repo_id}", {denoiser}device="cpu")
ids = model.tokenizer.encode("...", add_special_tokens=False).ids  # the prompt; [] where the task has none
tokens = model.generate(torch.tensor([ids], dtype=torch.long), max_new_tokens=16)  # the prompt and 16 new tokens
```
{about}"""


def local_folder(source: str | Path) -> Path:
    """The folder itself; for the text "owner/name", where no such folder is here, that model's from the hub."""
    if isinstance(source, Path) or Path(source).exists() or not re.fullmatch(r"[\w.-]*\w/[\w.-]+", source):
        return Path(source)
    from huggingface_hub import snapshot_download

    with _one_line(f"{source} is no folder here, and the Hugging Face hub did not give it"):
        return Path(snapshot_download(source, allow_patterns=FILES, library_name="unmask"))


def upload(folder: Path, repo_id: str, private: bool | None) -> str:
    """The files of a folder as a model of the hub, which is made if it is not there; its address."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="unmask", library_version=unmask.__version__)
    with _one_line(f"{repo_id} could not be written on the Hugging Face hub"):
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        said = f"Upload by unmask {unmask.__version__}"
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=said)
        return str(address)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of HTTP clients, which differ by version, or of the hub itself
        if type(error).__name__ in ("RepositoryNotFoundError", "GatedRepoError"):
            reason = "there is none that you may read"
        else:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        how = "check the name (owner/name), the network, and `hf auth login`"
        raise UserError(f"{what} ({reason}): {how}") from None
