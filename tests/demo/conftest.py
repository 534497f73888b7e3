"""What made the embedded weights is imported as it is run: from the folder `benchmarks`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
