"""Check of an LMDB environment in a separate process, which reads all records: `python check.py DIR`.

LMDB maps its file into memory. A truncated or overwritten file may therefore kill the reading process by a
signal (SIGBUS, SIGSEGV, SIGABRT). If the reader is a child process, the signal does not end its parent. This
file imports nothing of tiercache, so that the child starts in about 50 ms.
"""

from __future__ import annotations

import sys
from contextlib import suppress

import lmdb


def main(path: str) -> int:
    """Return 0 if every record is found and can be read, 1 if not.

    Damage that LMDB does not notice may kill the process by a signal.
    """
    try:
        with (
            open("/dev/null", "wb") as nowhere,
            lmdb.open(path, readonly=True, lock=False, create=False, max_dbs=8) as env,
            env.begin(buffers=True) as txn,
            txn.cursor() as names,
        ):
            for name, _ in names:
                db = env.open_db(bytes(name), txn, create=False)
                with txn.cursor(db) as cursor:
                    # Read the first and the last byte: the end of a value of many pages may lie behind the
                    # end of a truncated file.
                    read = sum(1 for _, value in cursor if not len(value) or value[0] + value[-1] >= 0)
                # A page number that leads to another sound page hides entries, and only the count shows it.
                if read != txn.stat(db)["entries"]:
                    return 1
            # A copy also reads the list of free pages. That pages are in neither costs room, and no entry.
            with suppress(lmdb.IncompatibleError):
                env.copyfd(nowhere.fileno(), compact=True)
    except (lmdb.Error, SystemError):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
