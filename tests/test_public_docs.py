"""Every public name says what its arguments are. Oracle: its signature."""

import dataclasses
import inspect

import pytest

import vmoer


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
