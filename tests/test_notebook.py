"""examples/quickstart.ipynb runs from top to bottom. Oracle: the outputs that are stored in it.

No notebook server is needed: a cell is executed as one would, its last expression shown by `_repr_html_` where it has one.
`python tests/test_notebook.py` stores the outputs anew.
"""

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


def outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell leaves below it, as nbformat 4 has it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, shown = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)})
    if shown is not None:
        data: dict[str, Any] = {"text/plain": [type(shown).__name__]}
        if hasattr(shown, "_repr_html_"):
            data["text/html"] = [shown._repr_html_()]
        found.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return found


def run(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    names: dict[str, Any] = {}
    return [outputs("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_gives_what_is_stored_in_it() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    stored = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    found = run(cells)
    assert sum(map(len, stored)) >= 4
    for ours, theirs in zip(found, stored, strict=True):
        assert [one["output_type"] for one in ours] == [one["output_type"] for one in theirs]
        for one, two in zip(ours, theirs, strict=True):
            if one["output_type"] == "stream":
                assert one["text"] == two["text"]
            else:
                assert one["data"].keys() == two["data"].keys()
                assert words(one) == words(two)


def words(output: dict[str, Any]) -> list[str]:
    """The words of an HTML output: numbers and shades may differ in their last digit between machines."""
    return re.findall(r"[A-Za-z_]+", re.sub(r"<[^>]*>", " ", "".join(output["data"].get("text/html", []))))


if __name__ == "__main__":
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, left in zip(code, run(code), strict=True):
        cell["outputs"] = left
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
