"""Ulysses sequence parallelism for PyTorch: exchange heads for sequence, and back, straight into the final layout."""

from . import ops  # registers the ops
from .communicator import Communicator
from .errors import (
    BackendUnavailableError,
    BrokenCommunicatorError,
    MismatchError,
    PeerAbortError,
    PeerTimeoutError,
    TargetError,
    UlyssesError,
)
from .exchange_group import ExchangeGroup
from .flight_record import dump_flight_records
from .functional import gather_heads, scatter_heads
from .layout import HeadPlan, head_plan


def __getattr__(name: str) -> object:
    if name in ("compile", "compile_options"):  # they need Inductor, whose import takes seconds
        from . import compiling

        return getattr(compiling, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "BrokenCommunicatorError",
    "Communicator",
    "ExchangeGroup",
    "HeadPlan",
    "MismatchError",
    "PeerAbortError",
    "PeerTimeoutError",
    "TargetError",
    "UlyssesError",
    "compile",
    "compile_options",
    "dump_flight_records",
    "gather_heads",
    "head_plan",
    "ops",
    "scatter_heads",
]
