"""What the programs in ``discovery_scripts/`` run, about once per second: one kept answer, asked for by many."""
