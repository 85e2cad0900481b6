from metalctl.cli import main

raise SystemExit(main())
