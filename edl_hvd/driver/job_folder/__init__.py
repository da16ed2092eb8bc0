"""A job's folder: who may take it, what is in it, what other terminals ask through it."""
