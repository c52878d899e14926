"""Makes the benches' modules importable, which lie beside the package and not in it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
