"""The status page: one HTML document, assembled when the daemon starts from the files beside this one."""

from __future__ import annotations

import base64
from hashlib import sha256
from importlib.resources import files

from aiohttp import web


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


class Page:
    """Serves the page. It needs nothing from anywhere else, and its policy allows nothing else."""

    def __init__(self) -> None:
        folder = files(__name__)
        html, css, script = (
            folder.joinpath(name).read_text(encoding="utf-8") for name in ("index.html", "page.css", "page.js")
        )
        html = _replace(html, '<link rel="stylesheet" href="page.css">', f"<style>{css}</style>")
        self._html = _replace(html, '<script src="page.js"></script>', f"<script>{script}</script>")
        policy = {
            "default-src": "'none'",
            "style-src": _hash_source(css),
            "script-src": _hash_source(script),
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        self._headers = {
            "Content-Security-Policy": "; ".join(f"{name} {source}" for name, source in policy.items()),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    def routes(self) -> list[web.RouteDef]:
        """The page is at the root."""
        return [web.get("/", self._get)]

    async def _get(self, _: web.Request) -> web.Response:
        return web.Response(text=self._html, content_type="text/html", headers=self._headers)


def _replace(html: str, tag: str, inline: str) -> str:
    assert html.count(tag) == 1, f"index.html has {tag} once"
    return html.replace(tag, inline)
