"""What a host is measured for before it gets workers, and whether it is good enough."""
