"""What `mkdocs build` needs of braid: pages of the reference, and links that leave `docs/`.

The reference has one page per package, made from the names that the package exports. Pages of
`docs/` are read in the repository, too, so they link to source files; in the site such a link is
the path as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc, ismodule, isroutine
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# packages that programs use, in the order of the reference
PACKAGES = (
    "braid",
    "braid.comm",
    "braid.parallel.data_parallel",
    "braid.parallel.pipeline",
    "braid.parallel.tensor_parallel",
    "braid.parallel.context_parallel",
    "braid.parallel.expert_parallel",
    "braid.parallel.sharding",
    "braid.parallel.hybrid",
    "braid.ps",
    "braid.rpc",
    "braid.rpc.dist_autograd",
    "braid.rpc.rl",
    "braid.parallel.graph",
    "braid.runtime.seeding",
    "braid.programs.layout",
    "braid.comm.redistribute",
    "braid.comm.autograd",
    "braid.strategies",
    "braid.strategies.placed",
    "braid.plan.search",
    "braid.plan.pipedream",
    "braid.ps.kv",
    "braid.compat.horovod.torch",
    "braid.compat.horovod.torch.elastic",
    "braid.compat.horovod.fusion",
    "braid.compat.torchgpipe",
    "braid.compat.torch_pipe",
    "braid.compat.megatron",
    "braid.compat.megatron.tensor_parallel",
    "braid.compat.megatron.pipeline_parallel",
    "braid.compat.megatron.distributed",
    "braid.compat.megatron.optimizer",
    "braid.compat.pslite",
    "braid.compat.torch_rpc.rpc",
    "braid.checkpoint",
    "braid.runtime.metrics",
    "braid.launch",
    "braid.train.prove",
    "braid.launch.observe",
    "braid.programs.schedule",
    "braid.programs.topology",
    "braid.programs.cost",
    "braid.runtime.message",
    "braid.runtime.store",
    "braid.errors",
)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Add the pages of the handbook, of the collectives and of the reference to the menu."""
    pages = {
        name: sorted(f"{name}/{path.name}" for path in (ROOT / "docs" / name).glob("[0-9a-z]*.md"))
        for name in ("handbook", "collectives")
    }
    pages["api"] = [{package: f"api/{package}.md"} for package in PACKAGES]
    for section in config.nav or []:
        for entries in section.values():
            if isinstance(entries, list) and isinstance(entries[0], str):
                entries.extend(pages[entries[0].split("/")[0]])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference, and the front page."""
    rows = []
    for package in PACKAGES:
        module = import_module(package)
        names = [name for name in module.__all__ if not name.startswith("__")]
        summary = (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        table = "\n".join(["| name | |", "|---|---|", *_sentences(package, module, names)])
        paths = [f"{package}.{name}" for name in names if not _is_torchs(getattr(module, name))]
        entries = "\n".join(f"::: {path}" for path in paths if path not in PACKAGES)
        page = f"# {package}\n\n{summary}\n\n{table}\n\n{entries}\n"
        uri = f"api/{package}.md"
        files.append(File.generated(config, uri, content=page))
        rows.append(f"| [`{package}`]({package}.md) | {summary} |")
    table = "\n".join(["# Reference", "", "| package | |", "|---|---|", *rows, ""])
    files.append(File.generated(config, "api/index.md", content=table))
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    return files


def _sentences(package: str, module: Any, names: list[str]) -> Iterator[str]:
    """Yield a row for each class and function, with the first sentence of its docstring."""
    for name in names:
        value = getattr(module, name)
        if isinstance(value, type) or isroutine(value) or ismodule(value):
            sentence = (getdoc(value) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            path = f"{package}.{name}"
            target = f"({path}.md)" if path in PACKAGES else f"[{path}]"
            link = f"`{name}`" if _is_torchs(value) else f"[`{name}`]{target}"
            yield f"| {link} | {sentence} |"


def _is_torchs(value: Any) -> bool:
    """Return whether a class or function is torch's, so that the reference has no entry for it."""
    has_module = isinstance(value, type) or isroutine(value)
    return has_module and (value.__module__ or "").partition(".")[0] == "torch"


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Turn links to files outside of `docs/` into text."""
    here = Path(page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        uri = (ROOT / "docs" / here / target).resolve()
        inside = uri.is_relative_to(ROOT / "docs")
        known = inside and files.get_file_from_path(str(uri.relative_to(ROOT / "docs")))
        return match[0] if known else text

    return LINK.sub(replaced, markdown)
