"""Parts of Inductor whose names differ between the supported versions of torch (2.11 to 2.14)."""

from __future__ import annotations

from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

# 2.11 asks a scheduler pass to be a graph pass; later versions have a class of their own.
CustomSchedulerPass = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)
