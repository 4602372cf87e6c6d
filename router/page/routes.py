"""The page for people at `/`: a chat, and a live picture of the cluster. Static files, and one JSON document."""

from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from kvasir.router.openai.errors import json_response, no_route
from kvasir.router.overview import Overview
from kvasir.router.page.picture import whole_picture
from kvasir.router.recent import Recent

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# What the model writes is shown as HTML: nothing in it may run, load, or call anywhere else.
_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, overview: Overview, recent: Recent) -> None:
    assets = _read_assets()

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in assets:
            raise no_route(request.method, request.url.path)
        return Response(assets[name], headers=_HEADERS | {"content-type": _MEDIA_TYPES[name.rpartition(".")[2]]})

    async def cluster(request: Request) -> Response:
        """`?answer=ID` adds which nodes gave the tokens of that answer."""
        answer = request.query_params.get("answer", "")
        content = whole_picture(await overview.pictures(answer), recent)
        if not answer:
            del content["served_by"]
        return json_response(content)

    app.add_route("/", asset, methods=["GET"], include_in_schema=False)
    app.add_route("/page/{name:path}", asset, methods=["GET"], include_in_schema=False)
    app.add_route("/cluster", cluster, methods=["GET"])


def _read_assets() -> dict[str, bytes]:
    """All that may be asked for, by name; no path is ever made of what a client sent."""
    static = files("kvasir.router.page") / "static"
    folders = {"": static, "vendor/": static / "vendor"}
    return {
        prefix + file.name: file.read_bytes()
        for prefix, folder in folders.items()
        for file in folder.iterdir()
        if file.is_file() and file.name.rpartition(".")[2] in _MEDIA_TYPES
    }
