"""`python -m kvasir.router`"""

import asyncio
import sys

import uvloop
from jinja2 import TemplateError

from kvasir.common.logging import configure_logging
from kvasir.router.config import RouterConfig
from kvasir.router.server import serve
from kvasir.router.text.token_bytes import UnsupportedTokenizer
from kvasir.router.workers.parent import serve_workers


def main() -> None:
    config = RouterConfig.load(sys.argv[1:], prog="kvasir router")
    configure_logging(config.log_level, f"router:{config.port}")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if config.workers > 1:
                sys.exit(runner.run(serve_workers(config)))
            runner.run(serve(config))
    except (OSError, ValueError, UnsupportedTokenizer, TemplateError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
