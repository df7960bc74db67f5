"""The machine's limits, measured in a process of its own like everything else."""

from __future__ import annotations

import json
import sys

from lily_py.bench.roofline import measure_roofline


def main() -> None:
    """Answer one request on standard output; figures go to standard error as they come."""
    request = json.loads(sys.argv[1])
    result = measure_roofline(**request, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result.as_json()))


if __name__ == "__main__":
    main()
