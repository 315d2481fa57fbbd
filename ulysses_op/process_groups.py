"""What users may name a group of ranks by, and the process group behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GroupLike: TypeAlias = "str | dist.ProcessGroup | DeviceMesh | None"


def resolve_group(group: GroupLike) -> dist.ProcessGroup:
    """The process group meant by None (the default one), a group's name, a ProcessGroup, or a one-dimensional
    DeviceMesh.

    Raises RuntimeError when no process group is initialised, ValueError for a name that is not known or a mesh of
    other dimensions, TypeError for anything else.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("no process group is initialised: call torch.distributed.init_process_group first")
    if group is None:
        return distributed_c10d._get_default_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        try:
            return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"no process group is named {group!r} in this process") from error
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"the mesh has {group.ndim} dimensions, one is needed: take a dimension, mesh['ulysses'] for example"
            )
        return group.get_group()
    raise TypeError(_no_group(group))


def _no_group(given: object) -> str:
    from .communicator import Communicator

    if isinstance(given, Communicator):
        return "group is a Communicator: use its methods, comm.scatter_heads(x) and comm.gather_heads(x)"
    return f"group is a {type(given).__name__}: expected None, a name, a ProcessGroup or a one-dimensional DeviceMesh"


@torch.compiler.assume_constant_result
def identify_group(group: GroupLike) -> tuple[str, int, int]:
    """Name, world size and this process's rank of the process group meant; constants under torch.compile. Raises as
    :func:`resolve_group` does.
    """
    resolved = resolve_group(group)
    return resolved.group_name, resolved.size(), resolved.rank()
