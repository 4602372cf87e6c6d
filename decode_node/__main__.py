"""`python -m kvasir.decode_node`"""

import sys

from kvasir.decode_node.config import DecodeConfig
from kvasir.node.process import leave, prepare_process


def main() -> None:
    config = DecodeConfig.load(sys.argv[1:], prog="kvasir decode")
    prepare_process(config, "decode")
    from kvasir.decode_node.process import run  # torch is imported from here on

    leave(run(config))


if __name__ == "__main__":
    main()
