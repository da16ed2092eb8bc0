"""A look at every new host before it gets workers: ``edlrun --preflight``."""
