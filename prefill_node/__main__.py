"""`python -m kvasir.prefill_node`"""

import sys

from kvasir.node.process import leave, prepare_process
from kvasir.prefill_node.config import PrefillConfig


def main() -> None:
    config = PrefillConfig.load(sys.argv[1:], prog="kvasir prefill")
    prepare_process(config, "prefill")
    from kvasir.prefill_node.process import run  # torch is imported from here on

    leave(run(config))


if __name__ == "__main__":
    main()
