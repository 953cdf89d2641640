"""The dashboard's files, which hold no data: what they show they ask for at /admin."""

from pathlib import Path

from starlette.responses import Response

from vertumnus.serve.http.api_error import ApiError

__all__ = ["dashboard_file"]

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}

HEADERS = {
    # The page may talk to this server only, and nobody may frame it.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def dashboard_file(folder: Path | None, name: str) -> Response:
    """ApiError 404 unless `folder` has such a file of a known kind. `name` is one path segment."""
    suffix = Path(name).suffix
    if folder is None or suffix not in MEDIA_TYPES or name != Path(name).name:
        raise ApiError(404, "there is nothing at this path", code="not_found")
    try:
        content = (folder / name).read_bytes()
    except (OSError, ValueError):
        raise ApiError(404, "there is nothing at this path", code="not_found") from None
    return Response(content, headers=HEADERS, media_type=MEDIA_TYPES[suffix])
