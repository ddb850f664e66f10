"""`python -m ropewalk.cluster.models NAME`: make a model ready and print what vLLM should load."""

from __future__ import annotations

import argparse
import sys

from ropewalk.cluster.models import EMBEDDED, ModelSourceError, resolve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ropewalk.cluster.models", description=__doc__)
    parser.add_argument("source", help=f"embedded model ({', '.join(EMBEDDED)}), directory, or Hugging Face id")
    try:
        print(resolve(parser.parse_args().source))
    except ModelSourceError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
