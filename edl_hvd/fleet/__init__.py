"""Many jobs on the hosts of one source: which of them gets which slots, without Kubernetes."""
