"""Distinguish errors of services from other errors.

If a service is down, slow or overloaded, a call of it fails whatever its input is.
"""

from collections.abc import Iterator

BUSY = (408, 425, 429)  # statuses of HTTP with which a server asks to try again
# bases of errors of connections that are no OSError: (package, name)
CONNECTION_ERRORS = {
    ("aiohttp", "ClientConnectionError"),
    ("grpc", "RpcError"),
    ("http", "HTTPException"),
    ("httpx", "TransportError"),
    ("openai", "APIConnectionError"),
    ("urllib3", "HTTPError"),
}
OF_A_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def is_passing(status: int) -> bool:
    """Return whether a request that got this status of HTTP may succeed later."""
    return status in BUSY or (status >= 500 and status != 501)


def of_a_service(error: BaseException) -> bool:
    """Return whether an error, or an error that led to it, states that a service failed.

    Such errors are failed connections, exceeded times of requests, and statuses that are passing. An exception may
    also state this itself, with the attribute `of_a_service`. The first error that states it decides.
    """
    return next((stated for stated in map(_statement, _causes(error)) if stated is not None), False)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _statement(error: BaseException) -> bool | None:
    stated = getattr(error, "of_a_service", None)
    if isinstance(stated, bool):
        return stated
    if (status := _status(error)) is not None:
        return is_passing(status)
    if isinstance(error, OSError):
        return None if isinstance(error, OF_A_PATH) else True
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(error).__mro__}
    return True if CONNECTION_ERRORS & bases else None


def _status(error: BaseException) -> int | None:
    """Return the status of HTTP that an error of a client states."""
    holders = (error, getattr(error, "response", None))
    stated = [getattr(holder, name, None) for holder in holders for name in ("status_code", "status", "code")]
    return next((one for one in stated if type(one) is int and 100 <= one < 600), None)
