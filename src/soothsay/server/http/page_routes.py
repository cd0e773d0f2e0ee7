"""Routes of the web page at `/`. They serve the files in `site/`, which hold no secret and need no key."""

from __future__ import annotations

from hashlib import blake2b
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from soothsay.server.http.api_route import ApiRoute

START = "index.html"
"""The file at `/`. Each other file is at `/site/` and its name."""

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""The page may load its own files and call its own server. It can never turn text into script."""

HEADERS = {
    "Cache-Control": "no-cache",  # browsers check their copy each time, so a new version shows at once
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[ApiRoute]:
    """One route for each file of the page. No other path is served, so none can leave the folder."""
    folder = resources.files("soothsay.server") / "site"
    return [
        _route(file.name, file.read_bytes())
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if _suffix(file.name) in TYPES
    ]


def _route(name: str, content: bytes) -> ApiRoute:
    tag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
    headers = {**HEADERS, "Content-Type": TYPES[_suffix(name)], "ETag": tag}

    async def serve(http: Request) -> Response:
        known = http.headers.get("if-none-match", "")
        if tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return ApiRoute("/" if name == START else f"/site/{name}", serve, keyless=True)


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
