"""`kvasir model prepare` fetches the built-in model ahead of time; `kvasir model convert` converts a GGUF file."""

import argparse
import sys
from pathlib import Path

from kvasir.cli.builtin_model import default_cache_dir, prepare_builtin_model
from kvasir.cli.convert_gguf import ModelPreparationError, convert_gguf


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvasir model", description="The built-in model, and GGUF files.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    prepare = commands.add_parser("prepare", help="fetch and convert it, and print its directory")
    prepare.add_argument("--cache-dir", type=Path, help=f"where to keep it (default: {default_cache_dir()})")
    convert = commands.add_parser("convert", help="turn a GGUF file of SmolLM2 or Gemma 3 into a model directory")
    convert.add_argument("gguf", type=Path, help="the file")
    convert.add_argument("directory", type=Path, help="what is made")
    options = parser.parse_args(argv)
    try:
        if options.command == "prepare":
            print(prepare_builtin_model(options.cache_dir))
        else:
            print(convert_gguf(options.gguf, options.directory))
    except ModelPreparationError as error:
        print(f"kvasir model: {error}", file=sys.stderr)
        return 1
    return 0
