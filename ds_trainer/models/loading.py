"""The boundary around what other libraries do with the files of a folder: whatever they raise is one `UserError`."""

import contextlib
from collections.abc import Iterator

from ds_trainer.ranks.failures import UserError, first_line


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Turn every error raised inside into a `UserError`: `what`, a colon, and the first line of the cause.

    Transformers takes a folder's files at their word in hundreds of places, and fails in each with another error.
    """
    try:
        yield
    except BaseException as error:
        # a panic inside the Rust code of tokenizers is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = first_line(error)[:300]
        if not (cause and isinstance(error, OSError | ValueError)):
            cause = f"{type(error).__name__}: {cause}".removesuffix(": ")
        if "trust_remote_code=True" in str(error):
            cause += "; give --trust_remote_code if you trust it"
        raise UserError(f"{what}: {cause}") from error
