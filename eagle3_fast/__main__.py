"""`python -m eagle3_fast` is the `eagle3-fast` command."""

from eagle3_fast.cli import main

raise SystemExit(main())
