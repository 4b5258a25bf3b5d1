"""Runs each block of Python of a page, top to bottom: `python .ci/readme.py README.md`."""

import re
import sys
from pathlib import Path

namespace = {"__name__": "readme"}
blocks = re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(), flags=re.DOTALL | re.MULTILINE)
for block in blocks:
    exec(compile(block, sys.argv[1], "exec"), namespace)
sys.exit(0 if blocks else "no block of Python")
