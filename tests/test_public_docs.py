"""Every public name says what its arguments are. Oracle: its signature."""

import dataclasses
import inspect
import re

import pytest

import vmoer
from vmoer.routers import methods


@pytest.mark.parametrize("name", sorted(set(vmoer.__all__)))
def test_every_argument_is_explained(name: str) -> None:
    public = getattr(vmoer, name)
    text = public.__doc__ or ""
    assert len(text.split("\n", 1)[0]) > 20
    if dataclasses.is_dataclass(public):
        arguments = [field.name for field in dataclasses.fields(public)]
    else:
        arguments = [p for p in inspect.signature(public).parameters if p != "self" and not p.startswith("_")]
    for argument in arguments:
        assert f"        {argument}: " in text or f"*{argument}: " in text, argument


@pytest.mark.parametrize("key", list(methods()))
def test_what_the_default_preset_changes_in_a_class_stands_beside_it(key: str) -> None:
    """Oracle: the class's own values and the preset's. Python's `FullCovariance()` is not what `vmoer train` makes."""
    kind = methods()[key]
    own = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, value in kind.presets.get("default", {}).items():
        assert own[name] != value
        (said,) = re.findall(rf"^        {name}: (.*?)(?=^        \w|^ *$)", f"{kind.__doc__}\n", re.S | re.M)
        for shown in (own[name], value):
            assert (f'"{shown}"' if isinstance(shown, str) else f"{shown:g}") in said, (name, shown)
        assert 'preset "default"' in re.sub(r"\s+", " ", said)
