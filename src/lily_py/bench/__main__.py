"""``python -m lily_py.bench``."""

from lily_py.bench.cli import main

raise SystemExit(main())
