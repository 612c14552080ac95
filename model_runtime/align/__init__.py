"""Product and reference compared operation by operation, for `firstlight align`; the command is in `server/align`."""
