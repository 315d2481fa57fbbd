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
from .functional import gather_heads, scatter_heads
from .layout import HeadPlan, head_plan

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
    "gather_heads",
    "head_plan",
    "ops",
    "scatter_heads",
]
