"""What is there and what is missing on this machine, each gap with its fix.

``findings`` is the value that all checks return; ``engine`` looks at Python, torch and Horovod, ``machine``
at tools and network, ``outside`` at what the job talks to; ``examination`` runs them in order.
"""
