"""Whether the workers of a job are well: stopped, silent, hung or slow."""
