"""``python -m lily``: the command line, for where `lily` isn't on the path."""

from lily_py.cli import main

raise SystemExit(main())
