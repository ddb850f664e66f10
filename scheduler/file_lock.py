"""A lock beside a file, for one writer among processes that may have been given the same path."""

from __future__ import annotations

import errno
import fcntl
import logging
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

WITHOUT_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
"""What file systems say that have no locks."""


class FileLock:
    """Held until the process ends, however it ends. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}.lock")
        self._held: IO[bytes] | None = None

    def acquire(self) -> bool:
        """Take the lock if nobody else has it; say whether it is held. Raises OSError where there can be no file."""
        if self._held is not None:
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                file.close()
                raise
            logger.warning("no lock on %s (%s): nothing keeps others from writing", self.path, error)
        self._held = file
        return True

    def release(self) -> None:
        """Let others have it."""
        if self._held is not None:
            self._held.close()
            self._held = None
