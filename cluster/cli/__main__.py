"""`python -m ropewalk.cluster.cli`: the same as the `ropewalk` command."""

import sys

from ropewalk.cluster.cli import main

sys.exit(main())
