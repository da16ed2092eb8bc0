"""Preemption notices: whether the platform has announced that this host will be gone.

    notice.py                                the ``Notice``, and the interface ``Provider.ask()``
    ec2.py google.py azure.py kubernetes.py  a class for each platform
    platforms.py                             the platforms of this machine, and their addresses
    watch.py                                 asks in a thread, and reports each notice once
    request.py                               one HTTP request to a nearby server

Runs in the workers, with the standard library alone. Other packages decide what follows from a notice.
"""
