"""What can go wrong, by name. Bad arguments are ``ValueError`` or ``TypeError``, raised before anything moves."""

from __future__ import annotations


class UlyssesError(RuntimeError):
    """Base of the errors below."""


class BackendUnavailableError(UlyssesError):
    """A backend asked for by name cannot run on some rank; raised on every rank, with the reason."""


class TargetError(UlyssesError):
    """A target could not be allocated or mapped on some rank; raised on every rank. The communicator stays usable."""


class BrokenCommunicatorError(UlyssesError):
    """The communicator failed earlier and cannot be used any more; build a new one with ranks that are well."""


class PeerTimeoutError(BrokenCommunicatorError):
    """A peer did not signal within ``timeout_s``, has closed its communicator, or its process has ended."""


class PeerAbortError(BrokenCommunicatorError):
    """A peer gave up, or closed its communicator, in the middle of a group."""


class MismatchError(BrokenCommunicatorError):
    """Ranks submitted different tags, shapes, dtypes, plans or orders."""


_KINDS: dict[str, type[BrokenCommunicatorError]] = {
    "mismatch": MismatchError,
    "peer_gone": PeerTimeoutError,
    "timeout": PeerTimeoutError,
    "driver": BrokenCommunicatorError,
}


def error_of_kind(kind: str) -> type[BrokenCommunicatorError]:
    """The error for what a transport, or a peer, calls a failure of this kind."""
    return _KINDS.get(kind, PeerAbortError)


def kind_of_error(error: BaseException) -> str:
    """What a rank that raises ``error`` tells its peers, so that they raise the like."""
    return next((kind for kind, cls in _KINDS.items() if type(error) is cls), "abort")
