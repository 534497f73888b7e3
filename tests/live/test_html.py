"""What notebooks show. Oracles: Python's HTML parser, and torch's own quantiles."""

from html.parser import HTMLParser

import numpy as np
import tiny
import torch

import vmoer
from vmoer.inference.generation import Answer
from vmoer.live import html

NASTY = ["<script>alert(1)</script>", "\"' onmouseover=x", "a\nb", "&amp;"]


class Reader(HTMLParser):
    """Tags that are opened, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_an_answer_shows_its_tokens_and_injects_nothing() -> None:
    signals = {"novelty": [0.0] * 4}
    answer = Answer("?", "".join(NASTY), [1, 2, 3, 4], NASTY, [-0.1, -2.0, 0.0, -1.0], signals, {NASTY[0]: 3.1}, 3.1)
    found = Reader(answer._repr_html_())
    assert set(found.tags) <= {"div", "span", "br", "table", "caption", "tr", "th", "td"}
    assert found.attributes == {"style", "title"}
    assert found.tags.count("span") == 4
    assert all(piece.replace("\n", "\u21b5") in found.text for piece in NASTY)
    assert "3.1" in found.text


def test_the_least_likely_token_is_the_reddest() -> None:
    shown = html.coloured(["a", "b", "c"], [0.0, 4.0, 2.0], "nll")
    assert [float(part.split(")")[0]) for part in shown.split("60,40,")[1:]] == [0.0, 0.6, 0.3]


def test_a_record_says_what_it_holds() -> None:
    model = vmoer.attach(tiny.model("granitemoe"), vmoer.MeanField()).eval()
    batch = tiny.batch()
    with vmoer.record(model) as rec, torch.no_grad():
        assert repr(rec) == "Record of vglr-mf: nothing yet"
        assert "nothing yet" in rec._repr_html_()
        model(**batch)
    rows, columns = batch["input_ids"].shape
    assert repr(rec) == f"Record of vglr-mf: layers {rec.layers}, {rows} x {columns} tokens"
    shown = Reader(rec._repr_html_()).text
    values = rec.signals["gate_entropy"][:, batch["attention_mask"].bool()]
    for expected in (values.min(), np.median(values.numpy()), values.max()):
        assert f"{expected:.4g}" in shown
