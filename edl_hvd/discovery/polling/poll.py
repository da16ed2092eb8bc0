"""One poll, which the programs in ``discovery_scripts/`` run about once per second for the whole life of a job.

Called as ``python -I -S poll.py CACHE SOURCE [words of the user]``. Prints the hosts and exits with 0, or prints one
line on standard error and exits with 1 (no answer that can be trusted) or 2 (wrong arguments).

While the last answer is fresh, or the files that it is from are unchanged, only this file runs, and it imports almost
nothing: importing ``edl_hvd`` would triple the cost of a poll. Everything else is in ``cached.py``.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

# Flags; a cloud's account, project or endpoint; a cluster's address; a batch system's job.
_DECIDING = ("EDL_HVD_DISCOVERY_", "AWS_", "CLOUDSDK_", "GCE_", "GOOGLE_", "KUBERNETES_SERVICE_", "SLURM_")


def main(words: list[str]) -> int:
    cache, source, *given = words
    folder = os.path.join(cache, f"edl_hvd-{os.getuid()}")
    key = os.path.join(folder, f"{source}-{_digest(words)}")
    answer = _fresh_answer(key)
    if answer is not None:
        sys.stdout.write(answer)
        return 0

    sys.path.insert(0, os.path.abspath(f"{__file__}/../../../.."))
    from edl_hvd.discovery.polling import cached

    return cached.poll(key, source, given, os.environ)


def _digest(words: list[str]) -> str:
    """The name of an entry of the cache: the same for the same words, folder, flags, account, cluster and job."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_DECIDING)]
    return hashlib.sha256("\0".join([os.getcwd(), *words, *variables]).encode(errors="replace")).hexdigest()[:32]


def _fresh_answer(key: str) -> str | None:
    """The cached answer while it is fresh, or what it was read from is unchanged; the record says how to tell."""
    try:
        folder = os.lstat(os.path.dirname(key))
        if folder.st_uid != os.getuid() or folder.st_mode & 0o170077 != 0o040000:
            return None  # others can write there; cached.py says what to do
        with open(f"{key}.answer", encoding="utf-8") as file, open("/proc/sys/kernel/random/boot_id") as boot:
            fresh_until, boot_id, length = file.readline().split()
            is_known = time.monotonic() < float(fresh_until) or is_unchanged(file.readline())
            if boot_id != boot.read().strip() or not is_known:
                return None
            answer = file.read().partition("\n\n")[2]
            os.utime(f"{key}.polled")  # tells the refresher that there are polls
            return answer if len(answer) == int(length) else None
    except (OSError, ValueError):
        return None


def is_unchanged(line: str) -> bool:
    """Whether the answer holds still: a time, and the signs and paths of files, with tabs between them."""
    until, *files = line.rstrip("\n").removeprefix("unchanged: ").split("\t")
    if not files or time.monotonic() >= float(until):
        return False
    return all(sign_of(path) == sign for sign, path in zip(files[::2], files[1::2]))  # noqa: B905 (costs an import)


def sign_of(path: str) -> str:
    """What a change of a file changes: its number, its size, and the time of its last change; "-" without a file.

    Following links. The time is that of the inode, which programs cannot set back.
    """
    try:
        found = os.stat(path)
    except OSError:
        return "-"
    return f"{found.st_dev}.{found.st_ino}.{found.st_size}.{found.st_ctime_ns}"


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # nothing has to be closed, and an orderly end costs a tenth of a poll
