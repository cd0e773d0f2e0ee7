"""The page's files are served unchanged, and refer only to each other."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import resources

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from soothsay.server.http.api_route import page_routes

FILES = {file.name: file.read_bytes() for file in (resources.files("soothsay.server") / "site").iterdir()}


@pytest.fixture(scope="module")
def files() -> TestClient:
    return TestClient(Starlette(routes=page_routes()))


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/site/{name}"


@pytest.mark.parametrize("name", FILES)
def test_files_are_served_as_they_are(files: TestClient, name: str) -> None:
    got = files.get(path_of(name))
    assert got.status_code == 200
    assert got.content == FILES[name]
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert got.headers["content-type"].partition(";")[0] == kind[name.rpartition(".")[2]]
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["referrer-policy"] == "no-referrer"
    assert got.headers["cache-control"] == "no-cache"


def test_policy_allows_nothing_but_the_server(files: TestClient) -> None:
    policy = dict(
        part.strip().split(" ", 1) for part in files.get("/").headers["content-security-policy"].split(";")
    )
    assert policy.pop("require-trusted-types-for") == "'script'"
    own = {name for name, value in policy.items() if value == "'self'"}
    assert own == {"script-src", "style-src", "connect-src", "img-src"}
    none = {name for name, value in policy.items() if value == "'none'"}
    assert none == set(policy) - own >= {"default-src", "base-uri", "form-action", "frame-ancestors"}


def test_a_browser_that_knows_a_file_is_not_sent_it_again(files: TestClient) -> None:
    tag = files.get("/").headers["etag"]
    for known in (tag, f'"other", {tag}', f"W/{tag}"):
        again = files.get("/", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert files.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    assert len({files.get(path_of(name)).headers["etag"] for name in FILES}) == len(FILES)
    assert files.head("/").status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/site/", "/site/..%2Fpage.py", "/site/%2e%2e/page.py", "/site/%2e%2e%2fpage.py", "/site//etc/passwd"],
)
def test_nothing_else_is_served(files: TestClient, path: str) -> None:
    assert files.get(path).status_code == 404


def test_files_name_only_each_other() -> None:
    named = set()

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            assert "style" not in given, tag
            assert not any(name.startswith("on") for name in given), tag
            assert tag != "style"
            assert tag != "script" or given.get("src")
            named.update(given[name] for name in ("src", "href") if given.get(name))

    Links().feed(FILES["index.html"].decode())
    for name, content in FILES.items():
        text = content.decode()
        named |= {f"site/{other}" for other in re.findall(r'from "\./(.+?)"', text)}
        urls = set(re.findall(r"https?://[^\s\"')]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), name
    named = {path for path in named if not path.startswith("#")}
    assert named == {f"site/{name}" for name in FILES} - {"site/index.html"}
