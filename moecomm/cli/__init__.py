"""The command `moecomm`: one module per subcommand, one module (`console.py`) for everything they print."""

from __future__ import annotations

__all__: list[str] = []
