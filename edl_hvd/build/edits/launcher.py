"""``horovodrun`` with hosts that come and go: a part of Horovod that is written in Python."""

from __future__ import annotations

from edl_hvd.build.edits.release import Edit, Mend

ANY_THREADS_SIGNAL = Mend(
    "The main thread waits in one join() for as long as a worker lives. A SIGINT or SIGTERM that the system hands to "
    "another thread does not wake it, so its handler never runs, and the job goes on.",
    "",
    "tests/elastic/test_host_changes.py",
    (
        Edit(
            "horovod/runner/elastic/driver.py",
            "            worker_thread.join()\n",
            """            # A handler runs when the main thread does, whichever thread took the signal.
            while worker_thread.is_alive():
                worker_thread.join(1)
""",
            "instead",
        ),
    ),
)
