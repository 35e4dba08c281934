"""`python -m moecomm` is the command `moecomm`."""

from __future__ import annotations

import sys

from moecomm.cli.main import main

sys.exit(main())
