"""Locations of logs, and atomic durable files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cdc_replay.changelog.storage import (
    Location,
    make_folder,
    put_if_absent,
    replace,
    storage_write_errors,
    sync_visible_files,
)
from cdc_replay.errors import ChangeLogNotWritable, InvalidConfiguration
from unit.changelog.small_log import SmallLog


@pytest.mark.parametrize("uri", ["{}", "file://{}"])
def test_a_folder_is_given_by_its_path_or_as_a_file_uri(tmp_path: Path, uri: str) -> None:
    location = Location.parse(uri.format(tmp_path / "a log"))
    assert (location.uri, location.path, location.is_local) == (str(tmp_path / "a log"),) * 2 + (True,)
    assert (location / "changes").parent == location
    assert (location / "changes").name == "changes"
    assert location.storage_options == {}


@pytest.mark.parametrize("uri", ["s3://bucket/a/b/", "gs://bucket/a/b", "az://bucket/a/b"])
def test_an_object_store_is_given_by_bucket_and_path(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    location = Location.parse(uri)
    assert (location.uri, location.path, location.is_local) == (uri.rstrip("/"), "bucket/a/b", False)
    assert type(location.filesystem).__name__ in {"S3FileSystem", "GcsFileSystem", "AzureFileSystem"}
    assert "a2V5" not in repr(location)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:secret@bucket/a",
        "s3://bucket/a?endpoint_override=secret",
        "abfss://container@secret.dfs.core.windows.net/a",
        "http://secret/a",
        "s3:///secret",
    ],
)
def test_a_uri_with_more_than_bucket_and_path_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(InvalidConfiguration, match="cannot be used") as refused:
        Location.parse(uri)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "part"),
    [
        ("/logs/100%25", "%25"),
        ("/logs/a\\b", "\\\\"),
        ("/logs/a\nb", "\\n"),
        ("/logs/a\udcff", "\\udcff"),
        ("file:///logs/a%2541", "%41"),
        ("s3://bucket/a%20b", "%20"),
        ("s3://bucket/a#b", "#"),
        ("s3://bucket/a//b", "//"),
    ],
)
def test_a_path_that_libraries_read_otherwise_is_refused(uri: str, part: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        Location.parse(uri)
    assert f"a path with '{part}' cannot" in str(refused.value)


@pytest.mark.parametrize("name", ["100%", "a b", "a#b", "a?b", "é", "[x]", "~"])
def test_a_folder_of_any_other_name_is_one(tmp_path: Path, name: str) -> None:
    small = SmallLog.create(tmp_path / name)
    small.pulls(2)
    assert small.verify().transactions == 2
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_azure_needs_the_name_of_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidConfiguration, match="az://") as refused:
        Location.parse("az://container/a")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("http://127.0.0.1:9000", {"allow_http": "true"}), ("https://storage.example", {}), (None, {})],
)
def test_a_store_without_encryption_is_used_only_where_the_environment_names_one(
    monkeypatch: pytest.MonkeyPatch, address: str | None, expected: dict[str, str]
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    if address is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    # No file system: making a client for AWS itself would ask it for the bucket's region.
    assert Location("s3://bucket/a", None, "bucket/a").storage_options == expected


def test_put_if_absent_writes_a_file_once_and_leaves_no_other_file(tmp_path: Path) -> None:
    file = Location.parse(str(tmp_path / "00.json"))
    assert put_if_absent(file, b"first")
    assert not put_if_absent(file, b"second")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"00.json": b"first"}


def test_names_with_a_prefix_include_those_of_partial_files(tmp_path: Path) -> None:
    for name in ("A-1", "B-1", "_partial.B-2", "_partial.A-2", "BB-1"):
        (tmp_path / name).touch()
    folder = Location.parse(str(tmp_path))
    assert sorted(folder.names_with("B-")) == ["B-1", "_partial.B-2"]
    assert (folder / "elsewhere").names_with("B-") == ()


def test_a_file_is_replaced_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = Location.parse(str(tmp_path / "00.json"))
    for content in (b"first", b"second, which is longer", b"third"):
        replace(file, content)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"00.json": content}


@pytest.mark.parametrize("broken", ["file", "folder"])
def test_a_failed_flush_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir() == (broken == "folder"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(ChangeLogNotWritable, match=str(tmp_path)), storage_write_errors(str(tmp_path)):
        put_if_absent(Location.parse(str(tmp_path / "00.json")), b"content")
    assert list(tmp_path.iterdir()) == []


def test_all_parents_of_a_new_folder_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that a killed process created may not be durable yet."""
    (tmp_path / "killed" / "meanwhile").mkdir(parents=True)
    flushed = set()
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.add(Path(f"/proc/self/fd/{descriptor}").readlink())
    )
    folder = tmp_path / "killed" / "meanwhile" / "changes" / "_delta_log"
    make_folder(Location.parse(str(folder)))
    assert folder.is_dir()
    assert flushed == set(folder.parents)


def test_flush_errors_of_a_read_only_folder_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refused)
    sync_visible_files(Location.parse(str(tmp_path)))
