"""What the site of `make docs` has beside the pages of this folder, for mkdocs (`hooks` in mkdocs.yml).

The README is its first page; whatever files the pages link to elsewhere in the repository come along; the reference is
made from docstrings, the gallery from the pictures of orders that the pages show.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

import griffe
from mkdocs.structure.files import File

import unmask

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")  # not those with a scheme
REFERENCE = {  # pages of modules, or of all modules of a package
    "decoding": ["decoding.generate", "decoding.tokens", "decoding.denoiser"],
    "policies": ["decoding.policies.*"],
    "tasks": ["tasks", "tasks.task", "tasks.exact"],
    "recipe": ["recipe"],
    "training": ["training.run", "training.objectives", "training.loop"],
    "evaluation": ["evaluation.plan", "evaluation.records", "evaluation.compare"],
    "models": ["models.order_model", "models.networks", "models.importers.*"],
    "variational": ["variational.*"],
}


def on_files(files: Any, config: Any) -> Any:
    linked, captions = _linked("README.md")
    for path in sorted(linked):
        if not path.startswith("docs/"):
            files.append(File.generated(config, _on_site(path), abs_src_path=str(ROOT / path)))
    for name, modules in REFERENCE.items():
        blocks = [f"# {name.capitalize()}", *(f"::: unmask.{module}" for module in _modules(modules))]
        files.append(File.generated(config, f"api/{name}.md", content="\n\n".join(blocks)))
    names = [f"- [`unmask.{name}`][{home}.{name}]" for name, home in sorted(unmask._HOMES.items())]
    names += ["- [`unmask.policies`](policies.md)"]
    files.append(File.generated(config, "api/index.md", content="\n".join(["# Public names", "", *names])))
    pictures = sorted(path for path in captions if re.fullmatch(r"docs/(learned-order\.png|results/.*\.svg)", path))
    titles = [captions[path][:1].upper() + captions[path][1:] for path in pictures]
    shown = [f"## {title}\n\n![{title}]({_on_site(path)})" for title, path in zip(titles, pictures, strict=True)]
    files.append(File.generated(config, "gallery.md", content="\n\n".join(["# Learned orders", *shown])))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository lead to where these are on the site."""
    site = page.file.src_uri
    source = next(
        (path for path in ("README.md", f"docs/{site}", site) if _on_site(path) == site and _is_file(path)), ""
    )
    if not source:
        return markdown

    def rewritten(link: re.Match[str]) -> str:
        target = _on_site(normpath(join(dirname(source), link[2])))
        return f"[{link[1]}]({relpath(target, dirname(site) or '.')}{link[3] or ''})"

    return LINK.sub(rewritten, markdown)


class Parameters(griffe.Extension):
    """What a docstring says of a parameter (`name: what it is`) is an item of a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            item = r"^([a-z_]\w*(?:(?:,| \.\.\.) \w+)*): "
            obj.docstring.value = re.sub(item, r"- `\1`: ", obj.docstring.value, flags=re.MULTILINE)


def _linked(start: str) -> tuple[set[str], dict[str, str]]:
    """The files of the repository that can be reached by links, by their paths, and the words of a link to each."""
    waiting, found, words = [start], {start}, dict[str, str]()
    while waiting:
        page = waiting.pop()
        for text, target, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = normpath(join(dirname(page), target))
            words.setdefault(path, text)
            if path not in found and _is_file(path):
                found.add(path)
                waiting += [path] if path.endswith(".md") else []
    return found, words


def _on_site(path: str) -> str:
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def _is_file(path: str) -> bool:
    return (ROOT / path).is_file()


def _modules(names: list[str]) -> list[str]:
    found = []
    for name in names:
        folder = ROOT / "src/unmask" / name.removesuffix(".*").replace(".", "/")
        inside = [f"{name.removesuffix('*')}{path.stem}" for path in sorted(folder.glob("[!_]*.py"))]
        found += inside if name.endswith(".*") else [name]
    return found
