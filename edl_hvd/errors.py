"""Every error this package raises on purpose, sorted by who must act.

    EdlHvdError
    ├── UsageError                 the user: an argument, a flag, a script
    │   ├── SettingsError          a setting or environment variable
    │   └── StateError             something given to ``State`` that cannot be kept
    ├── PlatformError              the machines: hosts, network, compiler, launcher
    │   ├── WorldBrokenError       a collective failed; the elastic loop recovers from it
    │   ├── RendezvousError        no world could be formed in the time allowed
    │   ├── ProtocolError          a connection brought a line that is no message
    │   ├── ProgressLostError      every holder of the training state is gone
    │   ├── DiscoveryError         a host source could not answer
    │   ├── NoTeacherError         no teacher has answered in the time allowed
    │   └── BuildError             Horovod could not be built or does not run
    ├── StorageError               the storage behind a URL
    │   ├── ObjectMissingError     no such object
    │   ├── ObjectExistsError      a conditional write lost the race
    │   ├── ObjectTooLargeError    an object has more bytes than its reader takes
    │   ├── OwnedError             another job writes checkpoints at this URL
    │   └── CheckpointDamagedError a checkpoint is listed but does not verify
    └── InternalError              us: a broken invariant, please report

A message says what was attempted, what arrived, what is accepted, and what to do next.
"""

from __future__ import annotations


class EdlHvdError(Exception):
    """Root of the tree; catch it to catch everything raised here on purpose."""


class UsageError(EdlHvdError, ValueError):
    """The caller can fix this by changing an argument or the script."""


class SettingsError(UsageError):
    """One or more settings are invalid; the message lists all of them."""


class StateError(UsageError):
    """Something handed to ``State`` cannot be snapshotted, checkpointed or restored."""


class PlatformError(EdlHvdError, RuntimeError):
    """A machine, network, compiler or launcher did not do its part."""


class WorldBrokenError(PlatformError):
    """A collective failed because a member of the world is gone."""


class RendezvousError(PlatformError):
    """No world could be formed."""


class ProtocolError(PlatformError):
    """A connection between a driver and a worker brought a line that is no message."""


class ProgressLostError(PlatformError):
    """The job had made progress, nobody alive holds it, and no checkpoint covers it."""


class DiscoveryError(PlatformError):
    """A host source could not give a trustworthy answer."""


class NoTeacherError(PlatformError):
    """No teacher has answered for as long as a script's patience, or none ever can."""


class BuildError(PlatformError):
    """Horovod could not be built, or what was built does not work."""


class StorageError(EdlHvdError, OSError):
    """The storage behind a URL refused, vanished or answered nonsense."""


class ObjectMissingError(StorageError):
    """The object does not exist."""


class ObjectExistsError(StorageError):
    """A conditional write found the object already there."""


class ObjectTooLargeError(StorageError):
    """The object has more bytes than the reader asked for at most."""


class OwnedError(StorageError):
    """Another job owns the checkpoint URL."""


class CheckpointFailedError(StorageError):
    """A checkpoint could not be written, and the job is to end when that happens (``on_checkpoint_failure="stop"``)."""


class CheckpointDamagedError(StorageError):
    """A checkpoint is listed but its contents do not verify."""


class InternalError(EdlHvdError, AssertionError):
    """An invariant of this package does not hold. A bug here, not in the caller."""


class EdlHvdWarning(UserWarning):
    """A script does something that has no effect, or another one than it looks; said once."""
