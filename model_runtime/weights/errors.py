"""The error of every file that cannot be served. API and engine processes; does not import torch."""

AGAIN = "copy or download the file again"
"""What helps where a file is not as it was made."""


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, inconsistent, or of an architecture or format that is not supported.

    The message is for the person who named the file: it says what was found, and what would have been right.
    """
