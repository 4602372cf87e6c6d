"""The bytes of a request, bounded while they are read."""

from starlette.requests import Request

from kvasir.router.openai.errors import HttpError


async def read_body(request: Request, max_bytes: int) -> bytes:
    """HttpError if it is too large, or compressed: nobody knows how large it then is."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        message = "compressed bodies are not taken: send it as it is, without Content-Encoding"
        raise HttpError(415, message, "unsupported_encoding", {"accept-encoding": "identity"})
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the request body may have at most {max_bytes} bytes", "request_too_large")
