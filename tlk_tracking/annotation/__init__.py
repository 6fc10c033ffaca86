"""One window's record: in memory, on disk, checked and counted."""
