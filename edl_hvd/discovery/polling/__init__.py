"""What the programs in ``discovery_scripts/`` run about once per second: many polls share one cached answer."""
