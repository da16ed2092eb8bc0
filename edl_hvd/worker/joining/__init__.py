"""How this process becomes a member of a world: one way per launcher."""
