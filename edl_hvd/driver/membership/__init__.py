"""Who is a member of the world: decided here, carried out elsewhere."""
