"""Files are uploaded as forms, read in a process of their own, and each is named with what was read of it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from blendserve.config import HttpConfig
from tests.support.http import Client, Server, bearer, serving
from tests.support.waiting import eventually

pytest.importorskip("python_multipart")
Files = dict[str, bytes]
READ = {
    "notes/otter.md": b"# Otters\n\nThe otter holds a stone.",
    "cafe.txt": "Der Biber fällt Bäume.".encode("latin-1"),
}
UNREAD = {"cut.txt": "漢".encode()[:2], "blank.csv": b"", "picture.png": b"\x89PNG"}
STATES = dict(zip(UNREAD, ("failed", "empty", "skipped"), strict=True))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where uploaded files are; none is left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    eventually(lambda: not [*tmp_path.glob("blendserve-upload-*")])


def upload(client: Client, files: Files, collection: str = "a", fields: Any = ()) -> httpx.Response:
    form = [("files", (name, content)) for name, content in files.items()]
    data = {"collection": collection, **dict(fields)}
    return client.http.post("/v1/documents", files=form, data=data, headers=bearer(client.key))


def ended(client: Client, response: httpx.Response) -> dict[str, Any]:
    """The job that an upload has started, at its end."""
    assert response.status_code == 202, response.text

    def look() -> dict[str, Any]:
        job: dict[str, Any] = client.get(f"/v1/jobs/{response.json()['id']}").json()
        return job if job["state"] != "running" else {}

    return eventually(look)


def test_files_become_documents_and_each_has_its_result(client: Client, folder: Path) -> None:
    job = ended(client, upload(client, READ | UNREAD))
    assert (job["state"], job["documents"], job["total_documents"]) == ("done", 2, 2)
    assert job["chunks"] == job["computed"] == 2
    assert {file["name"]: file["state"] for file in job["files"]} == STATES | dict.fromkeys(READ, "read")
    assert all(file["note"] for file in job["files"] if file["name"] != "notes/otter.md")
    found = client.ask("Which animal is the otter that holds a stone?", top_k=1, max_tokens=1)["passages"][0]
    assert (found["doc_id"], found["title"]) == ("notes/otter.md", "Otters")
    assert "fällt" in client.ask("Der Biber fällt Bäume.", top_k=1, max_tokens=1)["passages"][0]["text"]
    for name in READ:
        client.delete(f"/v1/documents/{name}", collection="a").raise_for_status()


def test_an_upload_of_nothing_that_can_be_read_fails(client: Client, folder: Path) -> None:
    job = ended(client, upload(client, UNREAD))
    assert (job["state"], job["documents"], job["total_documents"]) == ("failed", 0, 0)
    assert {file["name"]: file["state"] for file in job["files"]} == STATES


def test_names_of_files_lead_nowhere(tmp_path: Path, folder: Path) -> None:
    names = [
        "../../out.txt",
        "/tmp/out.txt",
        "..\\out.txt",
        "x y" * 12 + ".txt",
        "漢" * 6 + ".md",
    ]
    with serving(tmp_path / "server") as server:
        before = {*tmp_path.parent.iterdir(), *Path("/tmp").iterdir()}
        job = ended(server, upload(server, {name: f"Text of {n}.".encode() for n, name in enumerate(names)}))
        assert (job["state"], job["documents"]) == ("done", len(names))
        assert {*tmp_path.parent.iterdir(), *Path("/tmp").iterdir()} <= before
        listed = server.get("/v1/documents?collection=a").json()["data"]
    assert {*names} <= {document["id"] for document in listed}


@pytest.mark.parametrize(
    ("files", "fields"),
    [
        ({}, {}),
        (READ, {"foo": "bar"}),
        (READ, {"files": "text"}),
        ({"x" * 600 + ".txt": b"text"}, {}),
        ({f"{n}.txt": b"text" for n in range(101)}, {}),
    ],
)
def test_wrong_forms_are_refused(client: Client, folder: Path, files: Files, fields: dict[str, str]) -> None:
    assert upload(client, files, fields=fields).status_code == 400


def test_uploads_need_rights_and_an_existing_collection(server: Server, client: Client, folder: Path) -> None:
    assert upload(client, READ, "nowhere").status_code == 404
    assert upload(server.tenant(read_only=True), READ).status_code == 403
    assert upload(client.with_key("wrong"), READ).status_code == 401
    for headers, content in (("multipart/form-data", b"x"), ("multipart/form-data; boundary=b", b"--b\r\nx")):
        sent = {**bearer(client.key), "Content-Type": headers}
        assert client.http.post("/v1/documents", content=content, headers=sent).status_code == 400
        assert client.http.post("/v1/cache/pin", content=content, headers=sent).status_code == 400


def test_only_forms_may_be_large(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpConfig, "max_body", 1024)
    with serving(tmp_path / "server", max_upload_mb=1) as server:
        assert ended(server, upload(server, {"large.txt": b"a bee " * 20_000}))["state"] == "done"
        assert upload(server, {"large.txt": b"x" * 1_000_001}).status_code == 413
        head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
        parts = (head * (n == 0) + b"x" * 100_000 for n in range(11))  # without a length
        sent = {"Content-Type": "multipart/form-data; boundary=b"}
        assert server.http.post("/v1/documents", content=parts, headers=sent).status_code == 413
        assert server.post("/v1/documents", {"documents": [{"text": "x" * 2000}]}).status_code == 413
        for path in ("/v1/cache/pin", "/v1/documents/x"):
            assert server.http.post(path, content=b"x" * 2000, headers=sent).status_code in (405, 413)


def test_a_server_stops_while_it_reads_a_file(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "slow_readers-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: slow-readers\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[blendserve.readers]\nslow = tests.support.foreign_readers:forever\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    with serving(tmp_path / "server") as server:
        job = upload(
            server, {"first.txt": b"The first one.", "hangs.slow": b"", "last.txt": b"Never."}
        ).json()
        eventually(lambda: server.get(f"/v1/jobs/{job['id']}").json()["documents"] == 1)
        stop = threading.Thread(target=server.listener.close)
        stop.start()
        stop.join()
    with serving(tmp_path / "server") as again:
        job = again.get(f"/v1/jobs/{job['id']}").json()
        assert (job["state"], job["documents"], job["total_documents"]) == ("failed", 1, 3)
        assert [file["name"] for file in job["files"]] == ["first.txt"]
