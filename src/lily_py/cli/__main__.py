"""``python -m lily_py.cli``."""

from lily_py.cli import main

raise SystemExit(main())
