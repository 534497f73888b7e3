"""Files appear whole or not at all. Oracles: the bytes written, the folder's own listing, a file that `open` made."""

import gzip
import json
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from vmoer.errors import InputError, RunError
from vmoer.files import (
    locked,
    parse_json,
    read_regular,
    read_rows,
    write_bytes,
    write_json,
    write_rows,
    write_text,
)


def test_what_is_written_is_there_and_nothing_else(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": None}]
    write_text(tmp_path / "new" / "t", "é\n")
    write_json(tmp_path / "new" / "j", {"b": [1.5]})
    write_rows(tmp_path / "new" / "r", rows)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["j", "r", "t"]
    assert (tmp_path / "new" / "t").read_bytes() == "é\n".encode()
    assert json.loads((tmp_path / "new" / "j").read_text()) == {"b": [1.5]}
    assert json.loads((tmp_path / "new" / "r").read_text()) == rows
    assert len((tmp_path / "new" / "r").read_text().splitlines()) == 4


def test_it_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_bytes(tmp_path / "ours", b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_sweeps_its_own(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, step, broken)
    with pytest.raises(type(error)):
        write_text(tmp_path / "file", "new")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"file": "old"}


def test_a_signal_as_soon_as_the_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised behind the system's call and before anything is written. Oracle: what is left in the folder."""
    own = Path.open

    def interrupted(self: Path, *args: Any, **kwargs: Any) -> Any:
        own(self, *args, **kwargs).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "file", b"new")
    assert not list(tmp_path.iterdir())


def test_a_planted_link_is_neither_followed_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even by somebody who guesses the random name."""
    monkeypatch.setattr(secrets, "token_hex", lambda n: "guessed")
    (tmp_path / "victim").write_text("untouched")
    link = tmp_path / ".file.guessed"
    link.symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "file", "new")
    assert (tmp_path / "victim").read_text() == "untouched"
    assert link.is_symlink()
    assert not (tmp_path / "file").exists()


def test_writers_side_by_side_never_tear_a_file(tmp_path: Path) -> None:
    """Many writers with one process number, as in two containers that share a folder: a reader sees one of their texts."""
    texts = {letter * 200_000 for letter in "abcd"}
    path, failed = tmp_path / "file", list[BaseException]()
    write_text(path, "a" * 200_000)

    def work(text: str) -> None:
        try:
            for _ in range(25):
                write_text(path, text)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=[text]) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_text() in texts
    assert not failed
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    """Another process that asks is told at once; one that is killed lets go, and what it left is swept."""
    program = """
import sys, time
from pathlib import Path
from typing import Any
from vmoer.files import locked
with locked(Path(sys.argv[1])):
    (Path(sys.argv[1]) / ".file.0123456789abcdef").touch()
    print("held", flush=True)
    time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="is in use by another vmoer") as caught, locked(tmp_path):
            pass
        assert "\n" not in str(caught.value)
        (tmp_path / "sub").mkdir()
        with locked(tmp_path / "sub"):
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]
    (tmp_path / ".mine").touch()
    with locked(tmp_path):
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", ".mine", "sub"]
        with pytest.raises(RunError, match="in use"), locked(tmp_path):
            pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine", "sub"]


def test_a_planted_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(RunError, match="cannot be written"), locked(tmp_path):
        pass
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "too many digits"),
        ("NaN", "NaN is not a number of JSON"),
        ("[-Infinity]", "-Infinity is not a number"),
        ("{", "not valid JSON"),
        (b"\xff\xfe\xfd", "not valid JSON"),
    ],
)
def test_json_that_is_made_to_break_a_reader(text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_json(text, "file.json")
    assert str(caught.value).startswith("file.json")
    assert "\n" not in str(caught.value)


def test_a_packed_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "rows.json.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(300):
            file.write(b" " * 2**20)
    with pytest.raises(InputError, match="unpacks to more than"):
        read_rows(tmp_path / "rows.json")


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "not a plain file"), ("/dev/zero", "not a plain file"), ("nothing", "no such file")):
        with pytest.raises(InputError, match=message):
            read_regular(tmp_path / name, 100)
    with pytest.raises(InputError, match=r"not a plain file|cannot be read"):
        read_regular(tmp_path, 100)
