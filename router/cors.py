"""Which other sites' pages may ask from a browser: none, unless the operator names them."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from kvasir.router.config import RouterConfig


def allow_origins(app: FastAPI, config: RouterConfig) -> None:
    """A browser asks first whether it may, without a key; so that is answered in front of whatever wants one."""
    if not config.allowed_origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=["x-request-id", "retry-after"],
    )
