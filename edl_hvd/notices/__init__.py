"""Whether the host of this process is about to go, as its platform announces it.

    notice.py                          what is announced, and the one interface, ``Provider.ask()``
    ec2.py google.py azure.py kubernetes.py    a class for each platform
    places.py                          which of them this machine belongs to, and their addresses
    watch.py                           asks in a thread, and tells of each notice once
    asking.py                          one HTTP question to a server that is near

Runs in the workers, with the standard library alone. What to do about a notice is for others to decide.
"""
