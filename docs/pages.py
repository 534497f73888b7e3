"""What of the site is made from elsewhere. The site's build calls it as its hook and as its Griffe extension:

    api/...      a page for each public module of src/vmoer, in the same place, and its entry in the navigation; no files
    docstrings   how they are set

`python docs/pages.py` renews numbers in the pages themselves; tests/test_site.py checks that they are current:

    <!-- rows of FILE, SECTION -->      above a table of a page: its numbers are those of that section of FILE
"""

import ast
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def modules() -> list[str]:
    """Every public module: no part of its name begins with an underscore."""
    package = ROOT / "src" / "vmoer"
    found = []
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            found.append(".".join(parts))
    return sorted(found)


def pages() -> dict[Path, str]:
    """Where each module's page is, below api/, and what it says."""
    return {page(name): f"# {name}\n\n::: {name}\n" for name in modules()}


def page(name: str) -> Path:
    """A module's page has the module's place; a package's is the index of its folder."""
    parts = name.split(".")[1:]
    folder = ROOT / "src" / "vmoer" / Path(*parts)
    return Path(*parts, "index.md") if folder.is_dir() else Path(*parts).with_suffix(".md")


def renew() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text()
        if (new := re.sub(r"<!-- rows of (\S+), (.+?) -->\n+((?:\|.*\n)+)", renewed, text)) != text:
            path.write_text(new)


def renewed(match: re.Match[str]) -> str:
    """A table with the numbers that stand in its source now. A row is known by its cells that are no numbers."""
    file, section, table = match.groups()
    sections = re.split(r"^### ", (ROOT / file).read_text(), flags=re.M)
    theirs = rows(next((text for text in sections if text.startswith(f"{section}\n")), ""))
    text = match[0].replace(table, "\n".join(table.splitlines()[:2]) + "\n")
    for row in rows(table):
        names = {column: cell for column, cell in row.items() if not re.fullmatch(r"[-\d.]+( \[.*\])?", cell)}
        found = next((other for other in theirs if names.items() <= other.items()), row)
        text += "| " + " | ".join(found.get(column, cell) for column, cell in row.items()) + " |\n"
    return text


def rows(text: str) -> list[dict[str, str]]:
    """A Markdown table's rows, their cells by column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


# -- the hook ----------------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Fill the API part of the navigation: one section a package, one entry a module."""
    tree: dict[str, Any] = {}
    for relative in sorted(pages(), key=lambda p: (p.name != "index.md", p)):
        *folders, _ = relative.parts
        place = tree
        for folder in folders:
            place = place.setdefault(f"{folder}/", {})
        place[relative.stem] = f"api/{relative.as_posix()}"

    def section(place: dict[str, Any]) -> list[Any]:
        entries = [
            {name.rstrip("/"): section(value) if isinstance(value, dict) else value}
            for name, value in place.items()
            if name != "index"
        ]
        index = [place["index"]] if "index" in place else []
        return index + sorted(entries, key=lambda entry: next(iter(entry)))

    for entry in config.nav:
        if "API" in entry:
            entry["API"] = section(tree)
    return config


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    """Add the pages of the modules, which are nowhere on disk."""
    for relative, text in pages().items():
        files.append(File.generated(config, f"api/{relative.as_posix()}", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The package's own page ends with a table of what `import vmoer` gives."""
    return f"{markdown}\n{public_names()}" if page.file.src_uri == "api/index.md" else markdown


def public_names() -> str:
    """A table of what `import vmoer` gives, each name with the first line of its documentation."""
    lines = ["| name | |", "|:---|:---|"]
    tree = ast.parse((ROOT / "src" / "vmoer" / "__init__.py").read_text())
    found = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vmoer.")
        for alias in node.names
        if not alias.name.startswith("_")
    }
    for name in sorted(found, key=lambda name: (name[0].isupper(), name.lower())):
        module = _home(found[name], name)
        lines.append(f"| [`vmoer.{name}`][{module}.{name}] | {_first_line(module, name)} |")
    return "\n".join(lines) + "\n"


def _tree(module: str) -> ast.Module:
    parts = module.split(".")[1:]
    path = ROOT / "src" / "vmoer" / Path(*parts)
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _home(module: str, name: str) -> str:
    """The module that defines a name, found along its re-exports."""
    for node in _tree(module).body:
        if not isinstance(node, ast.ImportFrom) or name not in {alias.asname or alias.name for alias in node.names}:
            continue
        if node.module and node.module.startswith("vmoer."):
            return _home(node.module, name)
    return module


def _first_line(module: str, name: str) -> str:
    """The first sentence of its own documentation; where it has none, the first line of its module's."""
    tree = _tree(module)
    own = next(node for node in tree.body if getattr(node, "name", None) == name)
    text = (ast.get_docstring(own) or "").split("\n\n")[0].replace("\n", " ").split(". ")[0]  # type: ignore[arg-type]
    text = text or (ast.get_docstring(tree) or "").split("\n")[0]
    return text.removesuffix(".").removesuffix(":").replace("|", "\\|") + "."


# -- docstrings --------------------------------------------------------------------------------------------------------


class Docstrings(griffe.Extension):
    """Paragraphs set by hand (equations, columns) are shown as they are; `[L][G]` is a shape, not a link.

    What a package re-exports is documented where it is defined, and not again.
    """

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        if mod.is_init_module:
            mod.exports = None

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = "\n\n".join(map(_set, re.split(r"\n\s*\n", obj.docstring.value)))


def _set(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if all(line.startswith("    ") for line in lines):
        return paragraph
    if any(re.search(r"\S {3,}\S", line) for line in lines):
        return "\n".join(f"    {line}" for line in lines)
    return paragraph.replace("][", "]\\[")


if __name__ == "__main__":
    renew()
