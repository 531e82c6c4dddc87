"""Libraries that would write between the lines of a run."""


def hush_libraries() -> None:
    """No progress bars of transformers: ours says what goes on, and a live view cannot share its lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()
