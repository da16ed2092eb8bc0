"""Which sample indices make up global batch k of epoch e, for any world."""
