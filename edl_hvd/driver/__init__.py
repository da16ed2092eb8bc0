"""The process that starts workers and decides who is a member: ``edlrun``."""
