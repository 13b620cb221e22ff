"""Make the scripts of models/ importable: they import each other by their bare names, as when they are
run.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
