"""`kvasir COMMAND ...`: finds the command and hands over; nothing of a command is imported before it is chosen."""

import difflib
import runpy
import sys
from importlib import import_module

from kvasir import __version__

# name -> (module with a `main(argv) -> int`, or a service's package; one line of help)
COMMANDS = {
    "serve": ("kvasir.cli.serve", "run a whole cluster on this machine"),
    "chat": ("kvasir.cli.chat", "talk with a model in the terminal"),
    "bench": ("kvasir.cli.bench", "measure an endpoint: kvasir bench serve"),
    "model": ("kvasir.cli.model", "the built-in model, and GGUF files: kvasir model prepare | convert"),
    "router": ("kvasir.router", "run one router"),
    "prefill": ("kvasir.prefill_node", "run one prefill node"),
    "decode": ("kvasir.decode_node", "run one decode node"),
}
_SERVICES = ("router", "prefill", "decode")


def main(argv: list[str] | None = None) -> int:
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("--help", "-h", "help"):
        print(usage())
        return 0
    if command in ("--version", "-V", "version"):
        print(f"kvasir {__version__}")
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, [*COMMANDS, "version"], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        print(f"kvasir: unknown command {command!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[command]
    if command in _SERVICES:  # as `python -m` would run it
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    return int(import_module(module).main(rest))


def usage() -> str:
    lines = [f"  {name:<9}{text}" for name, (_, text) in [*COMMANDS.items(), ("version", ("", "print the version"))]]
    return "\n".join(
        [
            "usage: kvasir COMMAND [OPTIONS]",
            "",
            "LLM serving with prefill and decode on separate nodes.",
            "",
            *lines,
            "",
            "kvasir COMMAND --help lists the options of a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
